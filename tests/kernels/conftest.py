"""Chooses Triton's interpreter for kernels, before a test imports one: it needs no GPU."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
