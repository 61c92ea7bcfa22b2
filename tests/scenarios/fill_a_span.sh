# Thirty .txt files in books/ to a filled span, by the exported folder.
set -e
corpus='text:books/*.txt?document=file&validation=0.1'
python -m vocab.train --corpus="$corpus" --vocab_size=400 --output=vocabulary
python -m pipeline.build --task=span_corruption --name=books --corpus="$corpus" \
    --vocabulary=vocabulary --cache_dir=cache
python -m trainer.pretrain --preset=t5_1_1_mini --task=books_span_corruption --cache_dir=cache \
    --model_dir=model --batch_size=4 --train_steps=3 --evaluation.batches=1
python -m trainer.export --model_dir=model --output=t5 --license=cc0-1.0 --language=en
python - <<'END'
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("t5")
model = AutoModelForSeq2SeqLM.from_pretrained("t5")
inputs = tokenizer("Return the <extra_id_0> of the list.", return_tensors="pt")
print("filled", tokenizer.decode(model.generate(**inputs, max_new_tokens=5)[0]))
END
