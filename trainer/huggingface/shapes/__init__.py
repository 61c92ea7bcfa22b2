"""Model types of transformers beyond those of `formats`, registered on import."""

from trainer.huggingface.shapes import gemma as gemma
from trainer.huggingface.shapes import mistral as mistral
from trainer.huggingface.shapes import modernbert as modernbert
from trainer.huggingface.shapes import olmo2 as olmo2
from trainer.huggingface.shapes import qwen as qwen
from trainer.huggingface.shapes import roberta as roberta
from trainer.huggingface.shapes import t5gemma as t5gemma
from trainer.huggingface.shapes import t5gemma2 as t5gemma2
