"""The kinds of blocks that layers are made of, a file for each; `block` says what every kind answers for itself."""

from chairlift.models.blocks.attention import AttentionBlock, QKNorm, SelfAttention
from chairlift.models.blocks.block import (
    Arrange,
    Block,
    BlockModule,
    Cut,
    Packer,
    Part,
    Pass,
    Rotation,
    Units,
    Weight,
)
from chairlift.models.blocks.dense_mlp import Activation, DenseMLPBlock, GatedMLP
from chairlift.models.blocks.ends import EMBEDDING, HEAD, weights_of_ends
from chairlift.models.blocks.layer import DecoderLayer, Norms, PackedSublayer, Residual, weights_of_layer

__all__ = [
    "EMBEDDING",
    "HEAD",
    "Activation",
    "Arrange",
    "AttentionBlock",
    "Block",
    "BlockModule",
    "Cut",
    "DecoderLayer",
    "DenseMLPBlock",
    "GatedMLP",
    "Norms",
    "PackedSublayer",
    "Packer",
    "Part",
    "Pass",
    "QKNorm",
    "Residual",
    "Rotation",
    "SelfAttention",
    "Units",
    "Weight",
    "weights_of_ends",
    "weights_of_layer",
]
