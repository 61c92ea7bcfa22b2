# UL2 over two corpora of one's own names, read at 70 to 30.
set -e
books='text:books/*.txt?document=file&validation=0.1'
python -m vocab.train --corpus="$books" --vocab_size=400 --output=vocabulary
python -m pipeline.build --task=ul2 --name=books --corpus="$books" --vocabulary=vocabulary \
    --cache_dir=cache
python -m pipeline.build --task=ul2 --name=code --corpus='json:code.jsonl.gz?column=content' \
    --vocabulary=vocabulary --cache_dir=cache
python -m trainer.pretrain --preset=t5_1_1_tiny --task=books_ul2=0.7,code_ul2=0.3 \
    --cache_dir=cache --model_dir=model --batch_size=10 --train_steps=2 --evaluation.every_steps=0
palimpsest explain --model_dir=model --step=1 --row=3
