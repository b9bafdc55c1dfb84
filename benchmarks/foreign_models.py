"""Models that we did not write, by name: each row builds one with random weights, a small batch and a loss.

No network is needed. Packages are imported where they are used, so that the table can be read without them.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

os.environ.setdefault("HF_HUB_OFFLINE", "1")

Loss = Callable[[nn.Module, Any], torch.Tensor]
CLASSES = 7
WORDS, LENGTH, SAMPLES = 300, 32, 4
SIZES = {
    "vocab_size": WORDS,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    **{f"{name}_token_id": i for i, name in enumerate(("pad", "bos", "eos"))},
}


@dataclass(frozen=True)
class Case:
    """What a row builds: `loss(model, batch)` is what it trains on."""

    model: nn.Module
    batch: Any
    loss: Loss


@dataclass(frozen=True)
class Row:
    """One architecture. `missing` says why it cannot run beside a CPU build of its package."""

    name: str
    make: Callable[[], Case]
    missing: str = ""

    def build(self, seed: int = 0) -> Case:
        """A fresh copy: the same weights and the same batch for the same seed."""
        declare_torchvision()
        torch.manual_seed(seed)
        return self.make()

    @property
    def package(self) -> str:
        return self.name.split("/")[0]


# ---------------------------------------------------------------- torchvision beside a CPU build of torch

# What torchvision expects of its compiled part when it is imported. None of them is ever called here.
OPERATORS = (
    *(
        f"{start}{kind}{end}"
        for kind in ("roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool", "deform_conv2d")
        for start, end in (("", ""), ("_", "_backward"))
    ),
    *("nms", "qnms", "qroi_align"),
)
_declared: list[torch.library.Library] = []  # they exist as long as this does


def declare_torchvision() -> None:
    """Make `import torchvision` work where its compiled part does not load: its operators are declared, without any code.

    timm, transformers and peft import torchvision where it is installed, so this comes before each of them.
    """
    found = importlib.util.find_spec("torchvision")
    if _declared or found is None or found.origin is None or "torchvision" in sys.modules:
        return
    try:
        torch.ops.load_library(str(Path(found.origin).parent / "_C.so"))
    except OSError:
        _declared.append(torch.library.Library("torchvision", "DEF"))
        for name in OPERATORS:
            _declared[0].define(f"{name}(Tensor x) -> Tensor")


def lacks_operators() -> bool:
    """Whether torchvision's operators are only declared."""
    return bool(_declared)


# ---------------------------------------------------------------- losses and batches


def classify(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Cross entropy of the first output."""
    x, y = batch
    out = model(x)
    return F.cross_entropy(out[0] if isinstance(out, (tuple, list)) else out, y)


def segment(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    x, y = batch
    out = model(x)
    return F.cross_entropy(out["out"] if isinstance(out, dict) else out, y)


def of_its_own(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The loss that a model of transformers computes itself."""
    return model(**batch).loss


def of_detector(model: nn.Module, batch: Any) -> torch.Tensor:
    """Detectors of torchvision return their losses by name."""
    images, targets = batch
    return torch.stack(list(model(list(images), targets).values())).sum()


def squares(model: nn.Module, batch: Any) -> torch.Tensor:
    """For models without a loss: the mean square of what comes out."""
    out = model(**batch) if isinstance(batch, dict) else model(batch)
    if not torch.is_tensor(out):
        out = next(out[key] for key in ("last_hidden_state", "reconstruction", "logits") if key in out)
    return out.square().mean()


def images(pixels: int, samples: int = SAMPLES, classes: int = CLASSES) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(samples, 3, pixels, pixels), torch.randint(0, classes, (samples,))


def words(samples: int = SAMPLES, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(5, WORDS, (samples, length))


# ---------------------------------------------------------------- builders, by package


def timm_model(name: str, pixels: int, **how: Any) -> Case:
    import timm

    return Case(timm.create_model(name, pretrained=False, num_classes=CLASSES, **how), images(pixels), classify)


def timm_class(name: str, module: str, pixels: int, **how: Any) -> Case:
    import timm

    return Case(getattr(getattr(timm.models, module), name)(num_classes=CLASSES, **how), images(pixels), classify)


def vision(name: str, pixels: int = 64, **how: Any) -> Case:
    """A classifier of torchvision, by the name of its function."""
    from torchvision import models

    return Case(models.get_model(name, weights=None, num_classes=CLASSES, **how), images(pixels), classify)


def vision_class(name: str, pixels: int, **how: Any) -> Case:
    """A classifier of torchvision, by the name of its class, with sizes of our own."""
    from torchvision import models

    return Case(getattr(models, name)(num_classes=CLASSES, **how), images(pixels), classify)


def vision_segmentation(name: str, pixels: int = 64) -> Case:
    from torchvision import models

    model = getattr(models.segmentation, name)(weights=None, weights_backbone=None, num_classes=CLASSES)
    return Case(model, _maps(pixels), segment)


def vision_detector(name: str, pixels: int, **how: Any) -> Case:
    from torchvision import models

    model = getattr(models.detection, name)(weights=None, weights_backbone=None, num_classes=CLASSES, **how)
    boxes = torch.tensor([[4.0, 4.0, 30.0, 28.0], [10.0, 12.0, 40.0, 44.0]])
    masks = torch.zeros(2, pixels, pixels, dtype=torch.uint8)
    masks[:, 10:30, 10:30] = 1
    targets = [{"boxes": boxes + i, "labels": torch.tensor([1, 2]), "masks": masks} for i in range(2)]
    return Case(model, (torch.rand(2, 3, pixels, pixels), targets), of_detector)


def raft() -> Case:
    """Optical flow: a recurrent update, the same weights in every turn."""
    from torchvision import models

    def flow(model: nn.Module, batch: Any) -> torch.Tensor:
        first, second, target = batch
        return sum((guess - target).abs().mean() for guess in model(first, second, num_flow_updates=2))

    batch = torch.rand(1, 3, 128, 128), torch.rand(1, 3, 128, 128), torch.randn(1, 2, 128, 128)
    return Case(models.optical_flow.raft_small(weights=None), batch, flow)


def _maps(pixels: int, samples: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(samples, 3, pixels, pixels), torch.randint(0, CLASSES, (samples, pixels, pixels))


def smp_model(name: str, encoder: str = "tu-mobilenetv3_small_050", pixels: int = 64, **how: Any) -> Case:
    import segmentation_models_pytorch as smp

    model = getattr(smp, name)(encoder_name=encoder, encoder_weights=None, classes=CLASSES, **how)
    return Case(model, _maps(pixels), segment)


def transformer(kind: str, auto: str, batch: dict[str, torch.Tensor], loss: Loss = of_its_own, **config: Any) -> Case:
    """A model of transformers by the name of its configuration, made by one of its `AutoModel…` classes."""
    import transformers

    given = transformers.AutoConfig.for_model(kind, **config)
    given._experts_implementation = "eager"  # experts in one grouped product have no float64
    model = getattr(transformers, f"AutoModel{auto}").from_config(given)
    return Case(model.train(), batch, loss)


def of_class(name: str, batch: dict[str, torch.Tensor], config: Any, loss: Loss = of_its_own) -> Case:
    """A model of transformers by the name of its class; `config` is called with the package."""
    import transformers

    return Case(getattr(transformers, name)(config(transformers)).train(), batch, loss)


def causal(kind: str, *, length: int = LENGTH, **config: Any) -> Case:
    ids = words(length=length)
    return transformer(kind, "ForCausalLM", {"input_ids": ids, "labels": ids}, **{**SIZES, **config})


def masked(kind: str, **config: Any) -> Case:
    return transformer(kind, "ForMaskedLM", {"input_ids": words(), "labels": words()}, **{**SIZES, **config})


def sentence(kind: str, **config: Any) -> Case:
    batch = {"input_ids": words(), "labels": torch.randint(0, CLASSES, (SAMPLES,))}
    return transformer(kind, "ForSequenceClassification", batch, **{**SIZES, "num_labels": CLASSES, **config})


def pairs(kind: str, **config: Any) -> Case:
    """An encoder with a decoder."""
    return transformer(kind, "ForSeq2SeqLM", {"input_ids": words(), "labels": words(length=16)}, **config)


def pictures(kind: str, pixels: int = 64, **config: Any) -> Case:
    x, y = images(pixels)
    how = {"num_labels": CLASSES, **config}
    return transformer(kind, "ForImageClassification", {"pixel_values": x, "labels": y}, **how)


def speech(kind: str, auto: str = "ForCTC", **config: Any) -> Case:
    layers = {"conv_dim": (32, 32, 32), "conv_kernel": (10, 3, 3), "conv_stride": (5, 4, 2), "num_feat_extract_layers": 3}
    how = {
        **{name: SIZES[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")},
        **layers,
        "vocab_size": 40,
        "num_conv_pos_embeddings": 16,
        "num_conv_pos_embedding_groups": 4,
        "ctc_loss_reduction": "mean",
        "mask_time_prob": 0.0,
        **config,
    }
    labels = torch.randint(1, 40, (2, 6)) if auto == "ForCTC" else torch.randint(0, 2, (2,))
    return transformer(kind, auto, {"input_values": torch.randn(2, 3200), "labels": labels}, **how)


BART = {
    "vocab_size": WORDS,
    "d_model": 64,
    **{f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in (("layers", 2), ("ffn_dim", 128))},
    **{f"{side}_attention_heads": 4 for side in ("encoder", "decoder")},
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": 2,
}
T5 = {
    "vocab_size": WORDS,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 128,
    "num_layers": 3,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}


def whisper() -> Case:
    batch = {"input_features": torch.randn(2, 40, 64), "labels": words(2, 12)}
    how = {"num_mel_bins": 40, "max_source_positions": 32, "max_target_positions": 32}
    return transformer("whisper", "ForSpeechSeq2Seq", batch, **BART, **how, begin_suppress_tokens=None, suppress_tokens=None)


def speech_to_text() -> Case:
    batch = {"input_features": torch.randn(2, 64, 40), "labels": words(2, 12)}
    how = {"input_feat_per_channel": 40, "conv_channels": 64, "max_source_positions": 64, "max_target_positions": 32}
    return transformer("speech_to_text", "ForSpeechSeq2Seq", batch, **BART, **how)


def spectrogram() -> Case:
    batch = {"input_values": torch.randn(2, 64, 32), "labels": torch.randint(0, CLASSES, (2,))}
    how = {
        "max_length": 64,
        "num_mel_bins": 32,
        "num_labels": CLASSES,
        "frequency_stride": 8,
        "time_stride": 8,
        "patch_size": 8,
    }
    sizes = {name: SIZES[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")}
    return transformer("audio-spectrogram-transformer", "ForAudioClassification", batch, **how, **sizes)


def contrast(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(**batch, return_loss=True).loss


TOWER = {name: SIZES[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")}
VIT = {**TOWER, "image_size": 64, "patch_size": 16}


def clip(kind: str = "clip", **how: Any) -> Case:
    """Two towers, images and texts, that meet in a contrastive loss."""
    batch = {"input_ids": words(length=16), "pixel_values": torch.randn(SAMPLES, 3, 64, 64)}
    text = {
        **TOWER,
        "vocab_size": WORDS,
        "max_position_embeddings": 16,
        "eos_token_id": 2,
        "bos_token_id": 1,
        "pad_token_id": 0,
    }
    config = {"text_config": text, "vision_config": {**VIT}, **how}
    if kind not in ("siglip",):
        config["projection_dim"] = 32
    return transformer(kind, "", batch, contrast, **config)


def blip() -> Case:
    text = {**TOWER, "vocab_size": WORDS, "max_position_embeddings": 32, "encoder_hidden_size": 64}
    text |= {"bos_token_id": 1, "eos_token_id": 2, "sep_token_id": 2, "pad_token_id": 0}
    ids = words(length=16)
    batch = {"input_ids": ids, "pixel_values": torch.randn(SAMPLES, 3, 64, 64), "labels": ids}

    def config(package: Any) -> Any:
        return package.BlipConfig(text_config=text, vision_config={**VIT}, projection_dim=32, image_text_hidden_size=32)

    return of_class("BlipForConditionalGeneration", batch, config)


def llava() -> Case:
    """A language model that sees: image features take the place of some tokens."""
    ids = words(2, 28)
    ids[:, :16] = 3  # an image of 16 patches
    batch = {"input_ids": ids, "pixel_values": torch.randn(2, 3, 64, 64), "labels": ids.clone()}

    def config(package: Any) -> Any:
        return package.LlavaConfig(
            vision_config=package.CLIPVisionConfig(**VIT),
            text_config=package.LlamaConfig(**SIZES),
            image_token_id=3,
            vision_feature_select_strategy="default",
        )

    return of_class("LlavaForConditionalGeneration", batch, config)


def vilt() -> Case:
    batch = {
        "input_ids": words(length=12),
        "pixel_values": torch.randn(SAMPLES, 3, 64, 64),
        "labels": torch.rand(SAMPLES, CLASSES),
    }

    def config(package: Any) -> Any:
        return package.ViltConfig(**{**VIT, "vocab_size": WORDS, "num_labels": CLASSES, "max_position_embeddings": 64})

    return of_class("ViltForQuestionAnswering", batch, config)


def encoder_decoder() -> Case:
    """A ViT reads, a GPT-2 with cross attention writes."""
    batch = {"pixel_values": torch.randn(SAMPLES, 3, 64, 64), "labels": words(length=12)}

    def config(package: Any) -> Any:
        writer = package.GPT2Config(vocab_size=WORDS, n_embd=64, n_layer=2, n_head=4, n_positions=64)
        both = package.VisionEncoderDecoderConfig.from_encoder_decoder_configs(package.ViTConfig(**VIT), writer)
        both.decoder_start_token_id, both.pad_token_id = 1, 0
        return both

    return of_class("VisionEncoderDecoderModel", batch, config)


def detr(kind: str, **how: Any) -> Case:
    """Detection by a transformer on a small ResNet; the matching runs on the CPU."""
    labels = [{"class_labels": torch.tensor([1, 2]), "boxes": torch.rand(2, 4) * 0.4 + 0.2} for _ in range(2)]
    batch = {"pixel_values": torch.randn(2, 3, 64, 64), "labels": labels}

    def config(package: Any) -> Any:
        small = {"embedding_size": 8, "hidden_sizes": [8, 16, 32, 32], "depths": [1, 1, 1, 1], "layer_type": "basic"}
        features = ["stage2", "stage3", "stage4"] if kind == "DeformableDetr" else ["stage4"]
        backbone = package.ResNetConfig(**small, out_features=features)
        names = ("d_model", "encoder_layers", "decoder_layers", "encoder_ffn_dim", "decoder_ffn_dim")
        sizes = dict(zip(names, (64, 2, 2, 128, 128), strict=True))
        sizes |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_queries": 6, "num_labels": CLASSES}
        common = {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None, "backbone_config": backbone}
        return getattr(package, f"{kind}Config")(**common, **sizes, **how)

    return of_class(f"{kind}ForObjectDetection", batch, config)


def yolos() -> Case:
    labels = [{"class_labels": torch.tensor([1, 2]), "boxes": torch.rand(2, 4) * 0.4 + 0.2} for _ in range(2)]
    batch = {"pixel_values": torch.randn(2, 3, 64, 64), "labels": labels}
    how = {"num_detection_tokens": 6, "num_labels": CLASSES, "image_size": [64, 64]}
    return of_class("YolosForObjectDetection", batch, lambda package: package.YolosConfig(**{**VIT, **how}))


def maps_of(name: str, config: Any, pixels: int = 64) -> Case:
    x, y = _maps(pixels)
    return of_class(name, {"pixel_values": x, "labels": y}, config)


def series(name: str, **how: Any) -> Case:
    """Forecasting."""
    batch = {"past_values": torch.randn(4, 48, 2), "future_values": torch.randn(4, 12, 2)}
    sizes = {"num_input_channels": 2, "context_length": 48, "prediction_length": 12, **how}
    return of_class(f"{name}ForPrediction", batch, lambda package: getattr(package, f"{name}Config")(**sizes))


def lora(base: Callable[[], Case], config: str = "LoraConfig", **how: Any) -> Case:
    """An adapter of peft on a model of transformers."""
    import peft

    case = base()
    return Case(peft.get_peft_model(case.model, getattr(peft, config)(**how)).train(), case.batch, case.loss)


def lora_with_input_gradients() -> Case:
    """As fine-tuning with checkpoints does: embeddings come out with a gradient, though they are frozen."""
    case = lora(partial(causal, "llama"), target_modules=["q_proj", "v_proj"], r=4)
    case.model.enable_input_require_grads()
    return case


# ---------------------------------------------------------------- parts of PyTorch that are no plain layers


def plain(make: Callable[[], nn.Module], batch: Callable[[], Any], loss: Loss = classify) -> Case:
    return Case(make(), batch(), loss)


def vectors(samples: int = 32, width: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(samples, width), torch.randint(0, CLASSES, (samples,))


def sequences(samples: int = 8, length: int = 16, width: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(samples, length, width), torch.randint(0, CLASSES, (samples,))


def mlp(wrap: Callable[[nn.Module], nn.Module] = lambda layer: layer, width: int = 64) -> nn.Sequential:
    layers = [wrap(nn.Linear(32 if i == 0 else width, width)) for i in range(5)]
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.GELU())), nn.Linear(width, CLASSES))


def convolutions(wrap: Callable[[nn.Module], nn.Module] = lambda layer: layer) -> nn.Sequential:
    layers = [wrap(nn.Conv2d(3 if i == 0 else 16, 16, 3, padding=1)) for i in range(5)]
    body = (part for layer in layers for part in (layer, nn.ReLU()))
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, CLASSES))


class Recurrent(nn.Module):
    """Recurrent layers and a classifier of the last state."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.body = nn.ModuleList(getattr(nn, kind)(32, 32, batch_first=True) for _ in range(6))
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.body:
            x, _ = layer(x)
        return self.head(x[:, -1])


class Stacked(nn.Module):
    """Modules of several recurrent layers each, in both directions; each module is one unit."""

    def __init__(self) -> None:
        super().__init__()
        how = {"num_layers": 2, "bidirectional": True, "dropout": 0.1, "batch_first": True}
        self.body = nn.ModuleList(nn.LSTM(32, 16, **how) for _ in range(4))
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layers in self.body:
            x, _ = layers(x)
        return self.head(x.mean(1))


class Encoder(nn.Module):
    """`nn.TransformerEncoder` with its default dropout."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 4)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).mean(1))


class Translator(nn.Module):
    """`nn.Transformer`: encoder, decoder, cross attention."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Transformer(32, 4, 2, 2, 64, batch_first=True)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x, x.flip(1)).mean(1))


class Spectral(nn.Module):
    """A layer of a Fourier neural operator: its weight is complex."""

    def __init__(self, width: int, modes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width, modes, dtype=torch.cfloat) / width)
        self.skip = nn.Conv1d(width, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        modes = self.weight.shape[-1]
        low = torch.einsum("bim,iom->bom", torch.fft.rfft(x)[..., :modes].to(self.weight.dtype), self.weight)
        return F.gelu(torch.fft.irfft(low, n=x.shape[-1]).to(x.dtype) + self.skip(x))


class Operator(nn.Module):
    """A Fourier neural operator on sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.head = nn.Conv1d(32, 32, 1), nn.Linear(32, CLASSES)
        self.body = nn.Sequential(*(Spectral(32, 8) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.into(x.transpose(1, 2))).mean(-1))


class RandomDepth(nn.Module):
    """Blocks are left out at random, in Python: the graph differs from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(6))
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if not self.training or torch.rand(()) > 0.2:
                x = x + block(x)
        return self.head(x)


class Messages(nn.Module):
    """A graph network: messages along edges, added up by `index_add`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.head = nn.Linear(32, CLASSES)
        self.register_buffer("edges", torch.randint(0, 32, (2, 96)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        here, there = self.edges
        for layer in self.layers:
            x = F.relu(x + torch.zeros_like(x).index_add(0, there, layer(x)[here]))
        return self.head(x)


class Lists(nn.Module):
    """Weights that belong to no layer: a ParameterList and a ParameterDict."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(32, 32) / 6) for _ in range(5))
        self.scales = nn.ParameterDict({"first": nn.Parameter(torch.ones(32)), "second": nn.Parameter(torch.ones(32))})
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = torch.tanh(x @ weight)
        return self.head(x * self.scales["first"] * self.scales["second"])


class Tied(nn.Module):
    """A language model whose embedding is its head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 48)
        self.body = nn.ModuleList(nn.GRU(48, 48, batch_first=True) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.body:
            x = x + layer(x)[0]
        return x @ self.embed.weight.T


def next_word(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def critic(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """A gradient penalty: the loss itself calls autograd."""
    x, y = batch
    x = x.detach().requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return F.cross_entropy(out, y) + (slope.norm(dim=1) - 1).square().mean()


def meta(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """One step of meta-learning: the loss after an inner step on half of the batch."""
    x, y = batch
    half = len(x) // 2
    params = dict(model.named_parameters())
    inner = F.cross_entropy(torch.func.functional_call(model, params, (x[:half],)), y[:half])
    slopes = torch.autograd.grad(inner, list(params.values()), create_graph=True)
    params = {name: param - 0.1 * slope for (name, param), slope in zip(params.items(), slopes, strict=True)}
    return F.cross_entropy(torch.func.functional_call(model, params, (x[half:],)), y[half:])


DIFFERENTIATE = (critic, meta)  # losses in which even the head's gradient passes through most of the graph


def compiled(whole: bool) -> nn.Module:
    model = mlp()
    if whole:
        return torch.compile(model, backend="aot_eager")
    return nn.Sequential(torch.compile(model[:6], backend="aot_eager"), model[6:])


def scripted() -> nn.Module:
    model = mlp()
    return nn.Sequential(torch.jit.script(model[:6]), model[6:])


def checkpointed() -> nn.Module:
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            body = mlp()
            self.first, self.second = body[:6], body[6:]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(checkpoint(self.first, x, use_reentrant=False))

    return Checkpointed()


def orthogonal(layer: nn.Module) -> nn.Module:
    return nn.utils.parametrizations.orthogonal(layer)


def weight_norm(layer: nn.Module) -> nn.Module:
    return nn.utils.parametrizations.weight_norm(layer)


def spectral_norm(layer: nn.Module) -> nn.Module:
    return nn.utils.parametrizations.spectral_norm(layer)


def old_spectral_norm(layer: nn.Module) -> nn.Module:
    return nn.utils.spectral_norm(layer)


# ---------------------------------------------------------------- the table

TIMM: dict[str, tuple[int, dict[str, Any]]] = {
    "resnet10t": (64, {}),
    "mobilenetv2_035": (64, {}),
    "mobilenetv3_small_050": (64, {}),
    "mobilenetv4_conv_small_035": (64, {}),
    "lcnet_050": (64, {}),
    "tinynet_e": (64, {}),
    "ghostnet_050": (64, {}),
    "regnetx_002": (48, {}),
    "regnety_002": (48, {}),
    "ese_vovnet19b_slim": (48, {}),
    "hgnetv2_b0": (48, {}),
    "starnet_s1": (48, {}),
    "convnext_atto": (48, {}),
    "convnextv2_atto": (48, {}),
    "inception_next_atto": (48, {}),
    "edgenext_xx_small": (64, {}),
    "mobilevit_xxs": (64, {}),
    "mobilevitv2_050": (64, {}),
    "efficientvit_b0": (64, {}),
    "efficientformer_l1": (224, {"embed_dims": (16, 24, 32, 48), "depths": (1, 1, 1, 2)}),
    "vit_tiny_patch16_224": (64, {"img_size": 64, "depth": 4, "embed_dim": 96}),
    "deit_tiny_distilled_patch16_224": (64, {"img_size": 64, "depth": 4, "embed_dim": 96}),
    "deit3_small_patch16_224": (64, {"img_size": 64, "depth": 4, "embed_dim": 96}),
    "eva02_tiny_patch14_224": (56, {"img_size": 56, "depth": 4, "embed_dim": 96}),
    "beit_base_patch16_224": (64, {"img_size": 64, "depth": 4, "embed_dim": 96, "num_heads": 3}),
    "cait_xxs24_224": (64, {"img_size": 64, "depth": 4, "embed_dim": 96, "num_heads": 4}),
    "xcit_nano_12_p16_224": (64, {"depth": 4}),
    "convit_tiny": (64, {"img_size": 64, "depth": 4, "local_up_to_layer": 3}),
    "swin_tiny_patch4_window7_224": (56, {"img_size": 56, "depths": (1, 1, 2), "embed_dim": 24, "num_heads": (2, 2, 4)}),
    "swinv2_tiny_window8_256": (64, {"img_size": 64, "depths": (1, 1, 2), "embed_dim": 24, "num_heads": (2, 2, 4)}),
    "twins_svt_small": (64, {"img_size": 64, "depths": [1, 1, 2, 1], "embed_dims": [16, 32, 64, 64]}),
    "pvt_v2_b0": (64, {"depths": (1, 1, 2, 1)}),
    "davit_tiny": (64, {"depths": (1, 1, 2, 1), "embed_dims": (16, 32, 64, 64), "num_heads": (1, 2, 4, 4)}),
    "hiera_tiny_224": (64, {"img_size": 64, "stages": (1, 1, 2, 1), "embed_dim": 24}),
    "levit_128s": (224, {"embed_dim": (32, 48, 64), "depth": (1, 2, 1)}),
    "tiny_vit_5m_224": (64, {"embed_dims": (16, 32, 48, 64), "depths": (1, 1, 2, 1), "num_heads": (2, 2, 4, 4)}),
    "sequencer2d_s": (
        64,
        {"img_size": 64, "layers": (1, 1, 2, 1), "embed_dims": (24, 48, 48, 48), "hidden_sizes": (8, 16, 16, 16)},
    ),
}

STAGES = {"depths": (1, 1, 2, 1)}

# By class, where a name fixes all sizes: module, pixels, sizes.
TIMM_CLASSES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "MlpMixer": ("mlp_mixer", 64, {"img_size": 64, "num_blocks": 4, "embed_dim": 96}),
    "ConvMixer": ("convmixer", 32, {"dim": 48, "depth": 4}),
    "FocalNet": ("focalnet", 64, {**STAGES, "embed_dim": 24}),
    "MetaFormer": ("metaformer", 48, {**STAGES, "dims": (16, 32, 48, 64)}),
    "Nest": ("nest", 64, {"img_size": 64, "embed_dims": (24, 32, 48), "depths": (1, 1, 2), "num_heads": (2, 2, 4)}),
    "DLA": ("dla", 64, {"levels": (1, 1, 1, 2, 2, 1), "channels": (8, 8, 16, 24, 32, 48)}),
}

CAUSAL: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 128},
    "gpt_neo": {"num_layers": 4, "num_heads": 4, "attention_types": [[["global", "local"], 2]], "window_size": 16},
    "gptj": {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 128, "rotary_dim": 8},
    "gpt_neox": {},
    "gpt_bigcode": {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 128},
    "opt": {"ffn_dim": 128, "word_embed_proj_dim": 64},
    "bloom": {"n_layer": 4, "n_head": 4},
    "mpt": {"d_model": 64, "n_heads": 4, "n_layers": 4, "max_seq_len": 128},
    "falcon": {},
    "codegen": {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 128, "rotary_dim": 8},
    "llama": {},
    "mistral": {},
    "mixtral": {"num_local_experts": 4},
    "qwen2": {"tie_word_embeddings": True},
    "qwen2_moe": {
        "num_experts": 4,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "num_experts_per_tok": 2,
    },
    "qwen3": {"head_dim": 16},
    "gemma": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 16},
    "gemma3_text": {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 16},
    "phi": {},
    "phi3": {},
    "stablelm": {},
    "olmo": {},
    "olmo2": {},
    "cohere": {},
    "granite": {},
    "starcoder2": {},
    "biogpt": {},
    "mamba": {"state_size": 8, "length": 12},
    "mamba2": {"state_size": 8, "num_heads": 8, "head_dim": 16, "n_groups": 1, "chunk_size": 16},
    "falcon_mamba": {"state_size": 8, "length": 12},
    "rwkv": {"attention_hidden_size": 64, "length": 12},
    "recurrent_gemma": {"lru_width": 64, "attention_window_size": 16, "num_hidden_layers": 3, "head_dim": 16},
    "openai-gpt": {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 128},
}

MASKED: dict[str, dict[str, Any]] = {
    "bert": {},
    "roberta": {},
    "distilbert": {"dim": 64, "n_layers": 4, "n_heads": 4, "hidden_dim": 128},
    "albert": {"embedding_size": 32},
    "electra": {"embedding_size": 32},
    "deberta-v2": {"relative_attention": True, "position_buckets": 8, "pos_att_type": ["p2c", "c2p"]},
    "mpnet": {},
    "convbert": {"embedding_size": 32},
    "squeezebert": {
        "embedding_size": 64,
        **{f"{n}_groups": 2 for n in ("q", "k", "v", "post_attention", "intermediate", "output")},
    },
    "mobilebert": {"embedding_size": 32, "intra_bottleneck_size": 32, "true_hidden_size": 32},
    "fnet": {},
    "nystromformer": {"num_landmarks": 8, "segment_means_seq_len": 32},
    "modernbert": {"global_attn_every_n_layers": 2, "local_attention": 16, "sep_token_id": 2, "cls_token_id": 1},
    "roformer": {"embedding_size": 64},
    "big_bird": {"attention_type": "original_full"},
    "ibert": {},
    "esm": {"mask_token_id": 4},
}

PAIRS: dict[str, dict[str, Any]] = {
    "t5": T5,
    "mt5": T5,
    "longt5": {**T5, "local_radius": 8, "encoder_attention_type": "local"},
    "switch_transformers": {**T5, "num_experts": 4, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
    "bart": BART,
    "mbart": BART,
    "pegasus": BART,
    "marian": BART,
    "m2m_100": BART,
    "blenderbot-small": BART,
    "led": {**BART, "attention_window": 8, "max_encoder_position_embeddings": 128, "max_decoder_position_embeddings": 64},
    "prophetnet": {
        **{"vocab_size": WORDS, "hidden_size": 64, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128},
        **{f"num_{side}_layers": 2 for side in ("encoder", "decoder")},
        **{f"num_{side}_attention_heads": 4 for side in ("encoder", "decoder")},
        **{"decoder_start_token_id": 0, "max_position_embeddings": 128},
    },
}

FOUR_STAGES = {"hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 2, 1]}

PICTURES: dict[str, dict[str, Any]] = {
    "vit": VIT,
    "beit": VIT,
    "dinov2": {**TOWER, "image_size": 64, "patch_size": 16},
    "swin": {"image_size": 64, "embed_dim": 24, "depths": [1, 1, 2], "num_heads": [2, 2, 4], "window_size": 4},
    "swinv2": {"image_size": 64, "embed_dim": 24, "depths": [1, 1, 2], "num_heads": [2, 2, 4], "window_size": 4},
    "convnext": FOUR_STAGES,
    "resnet": {"embedding_size": 16, **FOUR_STAGES, "layer_type": "basic"},
    "regnet": {"embedding_size": 16, **FOUR_STAGES, "groups_width": 8},
    "segformer": {**FOUR_STAGES, "num_attention_heads": [1, 2, 4, 4], "decoder_hidden_size": 32},
    "pvt": {"image_size": 64, **FOUR_STAGES, "num_attention_heads": [1, 2, 4, 4]},
    "poolformer": {**FOUR_STAGES},
    "mobilevit": {"image_size": 64, "hidden_sizes": [24, 32, 40], "neck_hidden_sizes": [8, 8, 16, 24, 32, 40, 64]},
    "mobilenet_v2": {"depth_multiplier": 0.35},
    "focalnet": {"image_size": 64, "embed_dim": 24, "depths": [1, 1, 2, 1]},
    "vit_msn": VIT,
    "swiftformer": {"embed_dims": [16, 24, 32, 48], "depths": [1, 1, 2, 1], "image_size": 64},
}

# Rows that every recipe of the table below runs on too.
TEN = (
    *("transformers/gpt2", "transformers/t5", "transformers/llama", "transformers/qwen2", "transformers/gemma2"),
    *("transformers/mamba", "transformers/swin", "transformers/whisper", "transformers/wav2vec2", "transformers/clip"),
    "peft/lora-llama",
)
NMS = "its training calls nms and roi_align of torchvision's compiled part"


def _rows() -> list[Row]:
    out = [Row(f"transformers/{name}", partial(causal, name, **how)) for name, how in CAUSAL.items()]
    out += [Row(f"transformers/{name}", partial(masked, name, **how)) for name, how in MASKED.items()]
    out += [Row(f"transformers/{name}", partial(pairs, name, **how)) for name, how in PAIRS.items()]
    out += [Row(f"transformers/{name}", partial(pictures, name, **how)) for name, how in PICTURES.items()]
    llama = partial(causal, "llama")
    gpt2 = partial(causal, "gpt2", **CAUSAL["gpt2"])
    attention = {"target_modules": ["q_proj", "v_proj"]}
    small = {"patch_size": 4, "embed_dim": 24, "depths": [1, 1, 2], "num_heads": [2, 2, 4], "window_size": [4, 4]}
    more: dict[str, Callable[[], Case]] = {
        "transformers/bert-classifier": partial(sentence, "bert"),
        "transformers/whisper": whisper,
        "transformers/speech_to_text": speech_to_text,
        "transformers/audio-spectrogram": spectrogram,
        "transformers/wav2vec2": partial(speech, "wav2vec2"),
        "transformers/hubert": partial(speech, "hubert"),
        "transformers/wavlm": partial(speech, "wavlm"),
        "transformers/unispeech-sat": partial(speech, "unispeech-sat"),
        "transformers/data2vec-audio": partial(speech, "data2vec-audio"),
        "transformers/wav2vec2-classifier": partial(speech, "wav2vec2", "ForAudioClassification", num_labels=2),
        "transformers/clip": clip,
        "transformers/siglip": partial(clip, "siglip"),
        "transformers/chinese_clip": partial(clip, "chinese_clip"),
        "transformers/blip": blip,
        "transformers/llava": llava,
        "transformers/vilt": vilt,
        "transformers/vit-gpt2": encoder_decoder,
        "transformers/detr": partial(detr, "Detr"),
        "transformers/conditional-detr": partial(detr, "ConditionalDetr"),
        "transformers/deformable-detr": partial(detr, "DeformableDetr", num_feature_levels=3),
        "transformers/yolos": yolos,
        "transformers/segformer-maps": partial(
            maps_of,
            "SegformerForSemanticSegmentation",
            lambda package: package.SegformerConfig(**PICTURES["segformer"], num_labels=CLASSES),
        ),
        "transformers/dpt-maps": partial(
            maps_of,
            "DPTForSemanticSegmentation",
            lambda package: package.DPTConfig(
                **{**VIT, "num_labels": CLASSES, "fusion_hidden_size": 32, "neck_hidden_sizes": [16, 16, 32, 32]},
                backbone_out_indices=[0, 1, 2, 3],
                is_hybrid=False,
                use_auxiliary_head=True,
            ),
        ),
        "transformers/vit-mae": lambda: of_class(
            "ViTMAEForPreTraining",
            {"pixel_values": torch.randn(SAMPLES, 3, 64, 64)},
            lambda package: package.ViTMAEConfig(
                **VIT,
                decoder_hidden_size=32,
                decoder_num_hidden_layers=2,
                decoder_num_attention_heads=4,
                decoder_intermediate_size=64,
            ),
        ),
        "transformers/patchtst": partial(
            series,
            "PatchTST",
            d_model=32,
            num_attention_heads=4,
            num_hidden_layers=3,
            ffn_dim=64,
            patch_length=8,
            patch_stride=8,
        ),
        "transformers/patchtsmixer": partial(series, "PatchTSMixer", d_model=32, num_layers=3, patch_length=8, patch_stride=8),
        "transformers/vits-hifigan": lambda: of_class(
            "SpeechT5HifiGan",
            {"spectrogram": torch.randn(2, 16, 16)},
            lambda package: package.SpeechT5HifiGanConfig(
                model_in_dim=16,
                upsample_initial_channel=32,
                upsample_rates=[4, 2],
                upsample_kernel_sizes=[8, 4],
                resblock_kernel_sizes=[3],
                resblock_dilation_sizes=[[1, 3]],
            ),
            squares,
        ),
        "peft/lora-llama": partial(lora, llama, r=4, **attention),
        "peft/lora-gpt2": partial(lora, gpt2, r=4, target_modules=["c_attn"], fan_in_fan_out=True),
        "peft/lora-vit": partial(
            lora, partial(pictures, "vit", **VIT), r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["classifier"]
        ),
        "peft/lora-whisper": partial(lora, whisper, r=4, **attention),
        "peft/dora-llama": partial(lora, llama, r=4, use_dora=True, **attention),
        "peft/rslora-all-linear": partial(lora, llama, r=4, use_rslora=True, target_modules="all-linear"),
        "peft/ia3-llama": partial(
            lora, llama, "IA3Config", target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]
        ),
        "peft/loha-llama": partial(lora, llama, "LoHaConfig", r=4, **attention),
        "peft/lokr-llama": partial(lora, llama, "LoKrConfig", r=4, **attention),
        "peft/oft-llama": partial(lora, llama, "OFTConfig", oft_block_size=8, **attention),
        "peft/vera-llama": partial(lora, llama, "VeraConfig", r=8, target_modules=["q_proj", "o_proj"]),
        "peft/input-gradients": lora_with_input_gradients,
        "torchvision/resnet18": partial(vision, "resnet18", 48),
        "torchvision/mobilenet_v2": partial(vision, "mobilenet_v2", 48, width_mult=0.35),
        "torchvision/mobilenet_v3_small": partial(vision, "mobilenet_v3_small", 48),
        "torchvision/squeezenet1_1": partial(vision, "squeezenet1_1"),
        "torchvision/shufflenet_v2_x0_5": partial(vision, "shufflenet_v2_x0_5"),
        "torchvision/mnasnet0_5": partial(vision, "mnasnet0_5"),
        "torchvision/efficientnet_b0": partial(vision, "efficientnet_b0", 48),
        "torchvision/regnet_y_400mf": partial(vision, "regnet_y_400mf", 48),
        "torchvision/DenseNet": partial(
            vision_class, "DenseNet", 64, growth_rate=8, block_config=(2, 2, 2, 2), num_init_features=16
        ),
        "torchvision/VisionTransformer": partial(
            vision_class,
            "VisionTransformer",
            64,
            image_size=64,
            patch_size=16,
            num_layers=4,
            num_heads=4,
            hidden_dim=64,
            mlp_dim=128,
        ),
        "torchvision/SwinTransformer": partial(
            vision_class, "SwinTransformer", 64, **{**small, "patch_size": [4, 4]}, stochastic_depth_prob=0.1
        ),
        "torchvision/MaxVit": partial(
            vision_class,
            "MaxVit",
            64,
            **{
                "input_size": (64, 64),
                "stem_channels": 16,
                "partition_size": 2,
                "block_channels": [16, 32],
                "block_layers": [1, 1],
            },
            **{"head_dim": 8, "stochastic_depth_prob": 0.1},
        ),
        "torchvision/deeplabv3_mobilenet": partial(vision_segmentation, "deeplabv3_mobilenet_v3_large"),
        "torchvision/lraspp_mobilenet": partial(vision_segmentation, "lraspp_mobilenet_v3_large"),
        "torchvision/raft_small": raft,
        "smp/Unet": partial(smp_model, "Unet", "resnet18", 32),
        "smp/Unet-mobilenet": partial(smp_model, "Unet", "mobilenet_v2"),
        "smp/UnetPlusPlus": partial(smp_model, "UnetPlusPlus", pixels=32),
        "smp/MAnet": partial(smp_model, "MAnet"),
        "smp/Linknet": partial(smp_model, "Linknet"),
        "smp/FPN": partial(smp_model, "FPN"),
        "smp/PSPNet": partial(smp_model, "PSPNet"),
        "smp/PAN": partial(smp_model, "PAN", "resnet18", 128),
        "smp/DeepLabV3": partial(smp_model, "DeepLabV3"),
        "smp/DeepLabV3Plus": partial(smp_model, "DeepLabV3Plus"),
        "smp/UPerNet": partial(smp_model, "UPerNet"),
        "smp/Segformer": partial(smp_model, "Segformer", "mit_b0"),
        "torch/weight_norm": partial(plain, partial(convolutions, weight_norm), partial(images, 16, 16)),
        "torch/spectral_norm": partial(plain, partial(convolutions, spectral_norm), partial(images, 16, 16)),
        "torch/old_spectral_norm": partial(plain, partial(convolutions, old_spectral_norm), partial(images, 16, 16)),
        "torch/orthogonal": partial(plain, partial(mlp, orthogonal), vectors),
        "torch/RNN": partial(plain, partial(Recurrent, "RNN"), sequences),
        "torch/GRU": partial(plain, partial(Recurrent, "GRU"), sequences),
        "torch/LSTM": partial(plain, partial(Recurrent, "LSTM"), sequences),
        "torch/LSTM-stacked": partial(plain, Stacked, sequences),
        "torch/TransformerEncoder": partial(plain, Encoder, sequences),
        "torch/Transformer": partial(plain, Translator, sequences),
        "torch/fourier-operator": partial(plain, Operator, sequences),
        "torch/random-depth": partial(plain, RandomDepth, vectors),
        "torch/graph-network": partial(plain, Messages, vectors),
        "torch/parameter-lists": partial(plain, Lists, vectors),
        "torch/tied-embedding": partial(plain, Tied, words, next_word),
        "torch/gradient-penalty": partial(plain, mlp, vectors, critic),
        "torch/meta-learning": partial(plain, mlp, vectors, meta),
        "torch/compiled-part": partial(plain, partial(compiled, False), vectors),
        "torch/compiled": partial(plain, partial(compiled, True), vectors),
        "torch/scripted-part": partial(plain, scripted, vectors),
        "torch/checkpointed": partial(plain, checkpointed, vectors),
    }
    out += [Row(name, build) for name, build in more.items()]
    out += [Row(f"timm/{name}", partial(timm_model, name, pixels, **how)) for name, (pixels, how) in TIMM.items()]
    out += [
        Row(f"timm/{name}", partial(timm_class, name, module, px, **how)) for name, (module, px, how) in TIMM_CLASSES.items()
    ]
    out += [
        Row("torchvision/fasterrcnn", partial(vision_detector, "fasterrcnn_mobilenet_v3_large_320_fpn", 64), NMS),
        Row("torchvision/maskrcnn", partial(vision_detector, "maskrcnn_resnet50_fpn", 64), NMS),
    ]
    return out


ROWS: dict[str, Row] = {row.name: row for row in _rows()}
