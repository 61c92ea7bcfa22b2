"""The file formats, by the kind that names them in a SPEC.

To add a format, write a class like the ones here and add a line to FORMATS. A data set of the
Hugging Face Hub is read with the format that `datasets` names its builder after.
"""

from tasks.reading.formats.format import Format
from tasks.reading.formats.json_lines import JsonLines
from tasks.reading.formats.parquet import Parquet
from tasks.reading.formats.text import Text

FORMATS: dict[str, Format] = {
    "parquet": Parquet(),
    "json": JsonLines(),
    "text": Text(),
}
