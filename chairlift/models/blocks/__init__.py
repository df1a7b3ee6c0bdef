"""The kinds of blocks that layers are made of, a file for each; `block` says what every kind answers for itself.

Recurrent kinds are not named here: `mixers` reads them from configs, and nothing else needs to know them.
"""

from chairlift.models.blocks.altup import AltUpBlock, AltUpLayer, LaurelBlock, Streams, weights_of_streams
from chairlift.models.blocks.attention import AttentionBlock, QKNorm, QueryGrowth, SelfAttention
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
from chairlift.models.blocks.ends import EMBEDDING, weights_of_ends
from chairlift.models.blocks.experts import ClampedSwiGLU, Experts, ExpertsBlock, StackedLinear
from chairlift.models.blocks.head_orders import head_order
from chairlift.models.blocks.latent_attention import LatentAttentionBlock
from chairlift.models.blocks.layer import DecoderLayer, Norms, PackedSublayer, Residual, weights_of_layer
from chairlift.models.blocks.names import AS_LLAMA, AlternatingExperts, StackedExperts, TensorNames
from chairlift.models.blocks.parallel_mlps import ParallelExpertsBlock, ParallelMLPBlock
from chairlift.models.blocks.per_layer_input import (
    LayerInputs,
    LayerInputsConfig,
    PerLayerInputBlock,
    weights_of_layer_inputs,
)
from chairlift.models.blocks.router import Router, Scoring
from chairlift.models.blocks.shared_mlp import SharedMLPBlock

__all__ = [
    "AS_LLAMA",
    "EMBEDDING",
    "Activation",
    "AltUpBlock",
    "AltUpLayer",
    "AlternatingExperts",
    "Arrange",
    "AttentionBlock",
    "Block",
    "BlockModule",
    "ClampedSwiGLU",
    "Cut",
    "DecoderLayer",
    "DenseMLPBlock",
    "Experts",
    "ExpertsBlock",
    "GatedMLP",
    "LatentAttentionBlock",
    "LaurelBlock",
    "LayerInputs",
    "LayerInputsConfig",
    "Norms",
    "PackedSublayer",
    "Packer",
    "ParallelExpertsBlock",
    "ParallelMLPBlock",
    "Part",
    "Pass",
    "PerLayerInputBlock",
    "QKNorm",
    "QueryGrowth",
    "Residual",
    "Rotation",
    "Router",
    "Scoring",
    "SelfAttention",
    "SharedMLPBlock",
    "StackedExperts",
    "StackedLinear",
    "Streams",
    "TensorNames",
    "Units",
    "Weight",
    "head_order",
    "weights_of_ends",
    "weights_of_layer",
    "weights_of_layer_inputs",
    "weights_of_streams",
]
