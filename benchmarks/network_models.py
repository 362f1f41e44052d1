"""The networks that benchmarks/networks.py times: of other packages, at the sizes at which people train them.

The packages are those of the extra `networks`. Where they cannot be installed, a folder that has them is enough:
`pip install --no-deps --target FOLDER …`, then PYTHONPATH=FOLDER.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Network:
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    dtype: torch.dtype | None  # of autocast; None: float32 with TF32
    trains: bool = True

    @property
    def precision(self) -> str:
        return "TF32" if self.dtype is None else f"{str(self.dtype).removeprefix('torch.')} autocast"


def _nnunet() -> nn.Module:
    """As nnU-Net plans one for a patch of 128³: 32 to 320 channels, deep supervision."""
    from dynamic_network_architectures.architectures.unet import PlainConvUNet

    features = (32, 64, 128, 256, 320, 320)
    strides = ((1, 1, 1), *[(2, 2, 2)] * 5)
    norm = {"norm_op": nn.InstanceNorm3d, "norm_op_kwargs": {"eps": 1e-5, "affine": True}}
    act = {"nonlin": nn.LeakyReLU, "nonlin_kwargs": {"inplace": True}}
    sizes = {"n_conv_per_stage": 2, "num_classes": 3, "n_conv_per_stage_decoder": 2, "conv_bias": True}
    return PlainConvUNet(1, 6, features, nn.Conv3d, 3, strides, **sizes, **norm, **act, deep_supervision=True)  # type: ignore[no-any-return]


def _unet3d(order: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        from pytorch3dunet.unet3d.model import UNet3D

        return UNet3D(1, 2, f_maps=32, layer_order=order, is_segmentation=False)  # type: ignore[no-any-return]

    return build


def _monai(name: str, **settings: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        from monai.networks import nets

        return getattr(nets, name)(**settings)  # type: ignore[no-any-return]

    return build


def _resnet() -> nn.Module:
    import timm

    return timm.create_model("resnet50_gn")  # type: ignore[no-any-return]


class _Decoder(nn.Module):
    """The half of an autoencoder that makes images, at Stable Diffusion's sizes."""

    def __init__(self) -> None:
        super().__init__()
        from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

        kinds = {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
        sizes = {"block_out_channels": (128, 256, 512, 512), "layers_per_block": 2, "latent_channels": 4}
        self.model = AutoencoderKL(**kinds, **sizes)

    def forward(self, x: Tensor) -> Tensor:
        return self.model.decode(x, return_dict=False)[0]  # type: ignore[no-any-return]


_AN = {"norm": ("GROUP", {"num_groups": 8}), "act": "RELU", "adn_ordering": "AN"}
_UNET = {"spatial_dims": 3, "in_channels": 1, "out_channels": 2, "channels": (32, 64, 128, 256), "strides": (2, 2, 2)}
_SEG = {"spatial_dims": 3, "init_filters": 32, "in_channels": 4, "out_channels": 3}
NETWORKS = {
    "nnU-Net": Network(_nnunet, (2, 1, 128, 128, 128), torch.float16),
    "UNet3D crg": Network(_unet3d("crg"), (1, 1, 80, 160, 160), None),
    "UNet3D gcr": Network(_unet3d("gcr"), (1, 1, 80, 160, 160), None),
    "SegResNet": Network(_monai("SegResNet", **_SEG), (1, 4, 160, 160, 128), torch.float16),
    "MONAI UNet AN": Network(_monai("UNet", **_UNET, **_AN), (2, 1, 128, 128, 128), torch.float16),
    "resnet50_gn": Network(_resnet, (64, 3, 224, 224), torch.float16),
    "AutoencoderKL": Network(_Decoder, (1, 4, 64, 64), torch.bfloat16, trains=False),
}
