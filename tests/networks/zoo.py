"""Fifteen networks as their packages build them, a few channels wide."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Network:
    package: str  # its module
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    more: dict[str, Any] = field(default_factory=dict)  # arguments after the input

    def inputs(self) -> Tensor:
        return torch.randn(self.shape, generator=torch.Generator().manual_seed(0)) + 0.3


def _monai(name: str, **settings: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        from monai.networks import nets

        return getattr(nets, name)(**settings)  # type: ignore[no-any-return]

    return build


def _nnunet(name: str, **settings: Any) -> Callable[[], nn.Module]:
    """As nnU-Net plans them: instance norm and leaky_relu; the decoder's deep supervision off."""

    def build() -> nn.Module:
        from dynamic_network_architectures.architectures import unet

        usual = {
            "input_channels": 1,
            "n_stages": 3,
            "features_per_stage": (8, 16, 16),
            "conv_op": nn.Conv3d,
            "kernel_sizes": 3,
            "strides": (1, 2, 2),
            "num_classes": 3,
            "n_conv_per_stage_decoder": 1,
            "conv_bias": True,
            "norm_op": nn.InstanceNorm3d,
            "norm_op_kwargs": {"eps": 1e-5, "affine": True},
            "nonlin": nn.LeakyReLU,
            "nonlin_kwargs": {"inplace": True},
        }
        return getattr(unet, name)(**usual, **settings)  # type: ignore[no-any-return]

    return build


def _unet3d(name: str, **settings: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        from pytorch3dunet.unet3d import model

        sizes = {"in_channels": 1, "out_channels": 2, "f_maps": [8, 16], "num_groups": 4}
        return getattr(model, name)(**sizes, **settings)  # type: ignore[no-any-return]

    return build


def _four_groups(channels: int, **settings: Any) -> nn.Module:
    return nn.GroupNorm(4, channels, **settings)


def _timm(name: str, **settings: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import timm

        return timm.create_model(name, pretrained=False, num_classes=5, **settings)  # type: ignore[no-any-return]

    return build


def _decoder() -> nn.Module:
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

    return AutoencoderKL(block_out_channels=(8,), layers_per_block=1, norm_num_groups=4)


def _denoiser() -> nn.Module:
    from diffusers.models.unets.unet_2d import UNet2DModel

    kinds = {"down_block_types": ("DownBlock2D",), "up_block_types": ("UpBlock2D",)}
    sizes = {"block_out_channels": (8,), "layers_per_block": 1, "norm_num_groups": 4, "attention_head_dim": 8}
    return UNet2DModel(sample_size=16, **kinds, **sizes)


_VOLUME = (2, 1, 16, 16, 16)
_LEVELS = {"spatial_dims": 3, "in_channels": 1, "out_channels": 2, "channels": (8, 16, 16), "strides": (2, 2)}
_DYNAMIC = {"kernel_size": (3, 3, 3), "strides": (1, 2, 2), "upsample_kernel_size": (2, 2), "filters": (8, 16, 16)}
_LAYERS = (
    {"name": "conv_0", "n_features": 8, "kernel_size": 3},
    {"name": "res_1", "n_features": 8, "kernels": (3, 3), "repeat": 1},
    {"name": "conv_2", "n_features": 8, "kernel_size": 1},
    {"name": "conv_3", "kernel_size": 1},
)
NETWORKS: dict[str, Network] = {
    "MONAI UNet": Network("monai", _monai("UNet", **_LEVELS, num_res_units=1), _VOLUME),
    "MONAI UNet, AN with groups": Network(
        "monai", _monai("UNet", **_LEVELS, norm=("GROUP", {"num_groups": 4}), act="RELU", adn_ordering="AN"), _VOLUME
    ),
    "MONAI SegResNet": Network(
        "monai", _monai("SegResNet", init_filters=8, blocks_down=(1, 1), blocks_up=(1,), dropout_prob=None), _VOLUME
    ),
    "MONAI DynUNet": Network(
        "monai", _monai("DynUNet", spatial_dims=3, in_channels=1, out_channels=2, **_DYNAMIC), _VOLUME
    ),
    "MONAI HighResNet": Network(
        "monai",
        _monai("HighResNet", in_channels=1, out_channels=2, layer_params=_LAYERS, norm_type="INSTANCE"),
        _VOLUME,
    ),
    "MONAI AttentionUnet": Network("monai", _monai("AttentionUnet", **_LEVELS), _VOLUME),
    "nnU-Net": Network("dynamic_network_architectures", _nnunet("PlainConvUNet", n_conv_per_stage=1), _VOLUME),
    "nnU-Net, residual": Network(
        "dynamic_network_architectures", _nnunet("ResidualEncoderUNet", n_blocks_per_stage=1), _VOLUME
    ),
    "UNet3D, crg": Network("pytorch3dunet", _unet3d("UNet3D", layer_order="crg"), _VOLUME),
    "UNet3D, gcr": Network("pytorch3dunet", _unet3d("UNet3D", layer_order="gcr"), _VOLUME),
    "ResidualUNet3D": Network("pytorch3dunet", _unet3d("ResidualUNet3D"), _VOLUME),
    "timm resnet, group_norm": Network(
        "timm", _timm("resnet10t", norm_layer=_four_groups, channels=(8, 16, 24, 32)), (2, 3, 32, 32)
    ),
    "timm convnext": Network("timm", _timm("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 16, 24, 32)), (2, 3, 64, 64)),
    "diffusers AutoencoderKL": Network("diffusers", _decoder, (2, 3, 16, 16)),
    "diffusers UNet2DModel": Network("diffusers", _denoiser, (2, 3, 16, 16), {"timestep": 7}),
}
