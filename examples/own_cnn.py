"""Your own CNN inside a time budget, in thirty lines. Needs: pip install 'pliant[demo]' (handwritten digits)."""

import sys

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pliant import Session, recipes

torch.manual_seed(0)
digits = load_digits()
images, labels = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, torch.tensor(digits.target)
convs = [nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.ReLU()) for _ in range(4)]
model = nn.Sequential(nn.Conv2d(1, 32, 3, padding=1), *convs, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)


def loss(model, batch):
    inputs, targets = batch
    return F.cross_entropy(model(inputs), targets)


def train(images, recipe, epochs):
    loader = DataLoader(TensorDataset(images[:1500], labels[:1500]), batch_size=50, shuffle=True)
    with Session(model, optimizer, loss, recipe, total_steps=epochs * len(loader)) as session:
        session.fit(loader, epochs)
        print(session)  # what was asked, what is trained now, what a step takes
    right = model(images[1500:]).argmax(1) == labels[1500:]
    print(f"test accuracy {right.float().mean():.1%}")


epochs = 1 if "--quick" in sys.argv else 5
train(images, recipes.full(), 2 * epochs)  # the network that you have
noisy = images + 0.4 * torch.randn(images.shape)
train(noisy, recipes.pliant(time=0.7), epochs)  # the cheap way to the one that you need: here, for noisy images
