"""Text with a model of Hugging Face transformers, which runs as it is. Needs: pip install 'pliant[zoo]'.

python examples/text_hugging_face.py --model google/bert_uncased_L-4_H-256_A-4   # downloads a small BERT
python examples/text_hugging_face.py --quick                                    # a tiny BERT with random weights, offline
"""

import argparse

import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig, BertForSequenceClassification

from pliant import Session, recipes

GOOD = ["a warm and clever film", "i would watch it again", "the best evening in months", "funny, kind and well played"]
BAD = ["two hours that i want back", "dull and far too long", "nobody in it seems awake", "a plot without any point"]


def words(texts: list[str]) -> dict[str, torch.Tensor]:
    """Token ids of a vocabulary that is made of these sentences."""
    known = {word: i + 1 for i, word in enumerate(sorted({word for text in GOOD + BAD for word in text.split()}))}
    rows = [torch.tensor([known[word] for word in text.split()]) for text in texts]
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids > 0).long()}


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(**batch).loss


parser = argparse.ArgumentParser()
parser.add_argument("--model", help="name or folder of a pretrained model")
parser.add_argument("--time", default="60%", help="what a step may take, as a share of a full step")
parser.add_argument("--quick", action="store_true")
options = parser.parse_args()

torch.manual_seed(0)
texts, labels = GOOD + BAD, torch.tensor([1] * len(GOOD) + [0] * len(BAD))
if options.model and not options.quick:
    model = AutoModelForSequenceClassification.from_pretrained(options.model, num_labels=2)
    batch = dict(AutoTokenizer.from_pretrained(options.model)(texts, padding=True, return_tensors="pt"))
else:
    config = BertConfig(vocab_size=64, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, intermediate_size=128)
    model, batch = BertForSequenceClassification(config), words(texts)
batch["labels"] = labels

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
steps = 10 if options.quick else 60
with Session(model, optimizer, loss, recipes.pliant(time=options.time), total_steps=steps, clip=1.0) as session:
    for step in range(steps):
        value = session.step(batch)
        if step % 10 == 9:
            print(
                f"step {step + 1}: loss {value:.3f}; trains {', '.join(unit.name for unit in session.selection.units[:3])}, …"
            )
print(session)
