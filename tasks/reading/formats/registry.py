"""The file formats, by the kind that names them in a SPEC.

To add a format, write a class like the ones here and add a line to FORMATS. A data set of the
Hugging Face Hub is read with the format that `datasets` names its builder after.
"""

from tasks.reading.formats.arrow import Arrow
from tasks.reading.formats.delimited import Delimited
from tasks.reading.formats.format import Format
from tasks.reading.formats.json_lines import JsonLines
from tasks.reading.formats.parquet import Parquet
from tasks.reading.formats.text import Text
from tasks.reading.formats.warc import Warc

FORMATS: dict[str, Format] = {
    "parquet": Parquet(),
    "json": JsonLines(),
    "text": Text(),
    "csv": Delimited(),
    "tsv": Delimited(),
    "arrow": Arrow(),
    "wet": Warc(),
    "warc": Warc(),
}
