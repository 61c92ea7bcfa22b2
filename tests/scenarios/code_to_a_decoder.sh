# A code.jsonl.gz with the text in the column "content" to a decoder of 2,048 positions.
set -e
corpus='json:code.jsonl.gz?column=content'
python -m vocab.train --corpus="$corpus" --vocab_size=500 --keep_whitespace --byte_fallback \
    --output=vocabulary
python -m pipeline.build --task=lm --name=code --corpus="$corpus" --vocabulary=vocabulary \
    --cache_dir=cache --row_tokens=2048
python -m trainer.pretrain --preset=llama_mini --task=code_lm --cache_dir=cache --model_dir=model \
    --lengths.targets=2048 --batch_size=1 --train_steps=2 --evaluation.every_steps=0
python -m trainer.export --model_dir=model --output=llama
python - <<'END'
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("llama")
model = AutoModelForCausalLM.from_pretrained("llama")
inputs = tokenizer(["def f(", "import "], return_tensors="pt", padding=True)
print("positions", model.config.max_position_embeddings)
print("made", *tokenizer.batch_decode(model.generate(**inputs, max_new_tokens=4)))
END
