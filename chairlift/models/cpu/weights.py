"""The weights of a model in native code: brings them into its layout, and keeps all that it holds pointers to."""

import ctypes
import sys
from functools import partial
from itertools import accumulate, pairwise

import torch
from torch import nn

from chairlift.cache.layout import CacheLayout, Place
from chairlift.cache.states import StatePlace
from chairlift.models.blocks import Arrange, PackedSublayer, Rotation
from chairlift.models.calibration import Calibration
from chairlift.models.cpu import structures
from chairlift.models.cpu.packing import LANES, PackedMatrix, pack, pack_grouped, rope_table
from chairlift.models.cpu.parts import arrange_stacked, pack_parts
from chairlift.models.cpu.structures import BLOCKS, LayerInputs, Matrix, Model, Streams, Sublayer
from chairlift.models.decoder import Decoder
from chairlift.models.grouped import GroupedWeight, quantize
from chairlift.models.layers import Linear, RMSNorm
from chairlift.models.precision import Widths, is_sensitive_layer
from chairlift.models.rotary import RopeTable


def _as_they_are(rows: torch.Tensor) -> torch.Tensor:
    return rows


def _arrange_each(arrange: Arrange, num_parts: int, rows: torch.Tensor) -> torch.Tensor:
    parts = [arrange(part) for part in rows.chunk(num_parts)]
    return rows if sum(map(len, parts)) == len(rows) else torch.cat(parts)


class NativeWeights:
    """A `Packer`, which takes the weights out of a decoder.

    Matrices in groups of integers stay as they are, and others in the model's number format unless they are to be
    rounded.
    """

    lanes = LANES

    def __init__(
        self,
        model: Decoder,
        max_seq_len: int,
        widths: Widths | None,
        calibration_ids: torch.Tensor | None = None,
    ) -> None:
        """`widths`, `calibration_ids`: see `CpuDecoder`."""
        self._widths = widths
        self._is_sensitive_layer = False  # the layer that is being packed
        self._kept: list[object] = []
        self.num_bytes = 0
        self.has_groups = False  # whether some matrices are integers in groups
        config, self._dtype = model.config, model.dtype
        self._layout = CacheLayout.of(config.kept(config.dtype), config.num_layers, config.states())
        self._calibration = None if calibration_ids is None else _begin_calibration(model, calibration_ids)
        head = self._matrix(model.lm_head, num_bits=None if widths is None else widths.head)
        embedding, groups = None, Matrix()
        if not config.is_tied:
            rows = model.model.embed_tokens.let_go()
            if isinstance(rows, GroupedWeight):
                groups = self._place(pack_grouped(rows))
            else:
                embedding = self._keep(rows)
            del rows
        del model.model.embed_tokens  # the last reference to a tied head, which is packed now
        self._rotations = {
            key: Rotation(self._keep(rope_table(*key, max_seq_len)), table.shape[-1])
            for key, table in model.ropes.items()
        }
        layers = []
        for index, layer in enumerate(model.layers):
            self._is_sensitive_layer = is_sensitive_layer(index, config.num_layers)
            if self._calibration is not None:
                self._calibration.observe(layer)
            layers.append([self._sublayer(each) for each in layer.pack(self)])
            _give_back_memory()
        self.first_sublayers = list(accumulate(map(len, layers), initial=0))
        """The number of each layer's first sublayer, and of all sublayers."""
        sublayers = (Sublayer * self.first_sublayers[-1])(*(each for layer in layers for each in layer))
        self.layer_inputs = model.model.layer_inputs
        """Makes the beginning of what layers get of tokens beside the stream; None: they get nothing."""
        self.model = Model(
            hidden=config.hidden_size,
            vocab=config.vocab_size,
            eps=config.rms_norm_eps,
            embedding_scale=model.embedding_scale,
            residual_scale=config.residual_scale,
            logits_scale=1 / config.logits_divisor,
            logits_softcap=config.logits_softcap or 0.0,
            num_sublayers=len(sublayers),
            sublayers=sublayers,
            final_norm=self.norm(model.model.norm),
            embedding=embedding,
            embedding_groups=groups,
            head=head,
            layer_inputs=self._layer_inputs(),
            streams=self._streams(model),
        )

    def matrix(
        self,
        linear: Linear,
        arrange: Arrange = _as_they_are,
        *,
        is_exact: bool = False,
        is_plain: bool = False,
        is_sensitive: bool = False,
        num_value_rows: int = 0,
        input_scale: float = 1.0,
        num_parts: int = 1,
    ) -> Matrix:
        """See `Packer`."""
        parts = linear.let_go_parts() if num_parts > 1 else None
        if parts is not None:
            self.has_groups = True
            bias = None if linear.bias is None else _arrange_each(arrange, num_parts, linear.bias.float())
            placed = self._place(pack_parts(parts, arrange, bias))
            _give_back_memory()  # of the parts, which are many and small
            return placed
        if num_parts > 1:
            arrange = partial(_arrange_each, arrange, num_parts)
        return self._matrix(
            linear,
            arrange,
            is_exact=is_exact,
            is_plain=is_plain,
            num_bits=self._bits_for(is_sensitive=is_sensitive, has_values=num_value_rows > 0),
            num_value_rows=num_value_rows,
            input_scale=input_scale,
        )

    def plain_matrix(self, weight: torch.Tensor) -> Matrix:
        """See `Packer`."""
        return self._place(pack(weight.detach()))

    def _bits_for(self, *, is_sensitive: bool, has_values: bool) -> int | None:
        """Counts the bits of a matrix of the layer that is being packed; None: it is not rounded."""
        if self._widths is None:
            return None
        if has_values:
            return self._widths.values
        return self._widths.sensitive if is_sensitive and self._is_sensitive_layer else self._widths.most

    def norm(self, norm: RMSNorm | None, arrange: Arrange = _as_they_are) -> int | None:
        """The factors of a norm: float32, padded with zeros to whole vectors."""
        if norm is None:
            return None
        weight = arrange(norm.weight.detach().float() + norm.is_offset)
        return self._keep(nn.functional.pad(weight, (0, -len(weight) % LANES)))

    def rotation(self, table: RopeTable) -> Rotation:
        """See `Packer`."""
        return self._rotations[table]

    def place(self, layer_idx: int) -> Place:
        """See `Packer`."""
        place = self._layout.places[layer_idx]
        assert place is not None, "a block asks where its keys and values are, and declared none"
        return place

    def vector(self, tensor: torch.Tensor) -> int:
        """See `Packer`."""
        address = self._keep(tensor.detach().float().contiguous())
        assert address is not None, "a tensor has an address"
        return address

    def state_place(self, layer_idx: int) -> StatePlace:
        """See `Packer`."""
        assert self._layout.states is not None, "a block asks where its state is, and declared none"
        place = self._layout.states.places[layer_idx]
        assert place is not None, "likewise, for this layer"
        return place

    def _layer_inputs(self) -> LayerInputs:
        made = self.layer_inputs
        if made is None:
            return LayerInputs()
        self.num_bytes += made.embedding.num_bytes
        return LayerInputs(
            projection=self._matrix(made.projection),
            norm=self.norm(made.norm),
            size=made.config.size,
            scale=made.projection_scale,
            factor=made.factor,
        )

    def _streams(self, model: Decoder) -> Streams:
        made = model.model.streams
        if made is None:
            return Streams()
        products = [self._matrix(each) for each in (*made.spreading, *made.merging) if isinstance(each, Linear)]
        return Streams(
            count=1 + len(made.spreading), num_products=len(products), products=(Matrix * len(products))(*products)
        )

    def _sublayer(self, packed: PackedSublayer) -> Sublayer:
        sublayer = Sublayer(
            pre_norm=packed.pre_norm,
            post_norm=packed.post_norm,
            sum_norm=packed.sum_norm,
            is_continued=packed.is_continued,
            adds_input=packed.adds_input,
            scale=packed.scale,
        )
        for kind, fields in packed.blocks:
            assert kind is not None, "see find_obstacle"
            block = BLOCKS[kind](**fields)
            self._kept.append(block)
            setattr(sublayer, kind, ctypes.pointer(block))
        return sublayer

    def _matrix(
        self,
        linear: Linear,
        arrange: Arrange = _as_they_are,
        *,
        is_exact: bool = False,
        is_plain: bool = False,
        num_bits: int | None = None,
        num_value_rows: int = 0,
        input_scale: float = 1.0,
    ) -> Matrix:
        """`num_bits`: if it is rounded here; None: as most matrices have, if they are."""
        bias = None if linear.bias is None else arrange(linear.bias.float() / input_scale)
        stacked = None if is_plain else linear.let_go_parts()
        if stacked is not None:
            return self._place_stacked(arrange_stacked(stacked.read_each(), arrange, LANES), bias)
        weight = linear.let_go()
        if is_plain and isinstance(weight, GroupedWeight):
            weight = weight.dequantize(self._dtype)[:, : linear.in_features]
        if isinstance(weight, torch.Tensor) and (is_exact or is_plain or self._widths is None):
            return self._place(pack(arrange(weight), bias))
        self.has_groups = True
        if isinstance(weight, GroupedWeight):
            weight = weight.map_rows(arrange)  # frees the rows in their first order
            return self._place(pack_grouped(weight, bias))
        assert self._widths is not None, "see above"
        importance = None if self._calibration is None else self._calibration.importance(linear)
        num_bits = num_bits or self._widths.most
        if not (num_value_rows and self._widths.keeps_errors):
            return self._place(_packed(quantize(weight, num_bits, importance).map_rows(arrange), bias))
        weight = arrange(weight)
        rounded = quantize(weight, num_bits, importance)
        last = rounded.rows(slice(-num_value_rows, None))
        lost = weight[-num_value_rows:].float() - last.dequantize()[:, : weight.shape[1]]
        return self._place(_packed(rounded, bias), _packed(quantize(lost, num_bits, importance)))

    def _place_stacked(self, parts: list[GroupedWeight], bias: torch.Tensor | None) -> Matrix:
        """Places matrices of one format each, whose columns follow one another. `bias`: of all of them."""
        self.has_groups = True
        matrices = [self._place(pack_grouped(part, None if index else bias)) for index, part in enumerate(parts)]
        for matrix, following in reversed(list(pairwise(matrices))):
            matrix.next = ctypes.addressof(following)
            matrix.first_next = matrix.columns // LANES
            matrix.columns += following.columns
        self._kept += matrices
        return matrices[0]

    def _place(self, matrix: PackedMatrix, residual: PackedMatrix | None = None) -> Matrix:
        """`residual`: the rounding errors of the last columns, in the same format."""
        parts = ("panels", "scales", "offsets", "units")
        places = {name: self._keep(getattr(matrix, name)) for name in (*parts, "steps", "bias", "table")}
        if residual is not None:
            places |= {f"residual_{name}": self._keep(getattr(residual, name)) for name in parts}
        return Matrix(
            columns=matrix.num_outputs,
            depth=matrix.depth,
            num_bits=matrix.num_bits,
            group_size=matrix.group_size,
            scale_bits=0 if matrix.scales is None else 8 * matrix.scales.itemsize,
            scales_per_step=matrix.scales_per_step,
            first_residual=0 if residual is None else matrix.num_outputs - residual.num_outputs,
            **places,
        )

    def _keep(self, tensor: torch.Tensor | None) -> int | None:
        if tensor is not None:
            self._kept.append(tensor)
            self.num_bytes += tensor.nbytes
        return structures.address_of(tensor)


def _packed(rounded: GroupedWeight, bias: torch.Tensor | None = None) -> PackedMatrix:
    """Packs what `quantize` has made."""
    return pack_grouped(rounded, bias, has_byte_scales=rounded.num_bits == 4)


def _begin_calibration(model: Decoder, token_ids: torch.Tensor) -> Calibration:
    """Embeds the tokens. What is read for that, such as a tied head, is still to be packed afterwards."""
    for around in (model.model.layer_inputs, model.model.streams):
        for each in () if around is None else around.modules():
            if isinstance(each, Linear):
                each.read()
    if not model.config.is_tied:
        return Calibration(model, token_ids)
    model.lm_head.read()
    embedding = model.model.embed_tokens
    embedding.weight = model.lm_head.weight
    calibration = Calibration(model, token_ids)
    del embedding.weight
    return calibration


def _give_back_memory() -> None:
    """Returns freed memory to the system: glibc would keep it, some hundred MB while a model is loaded."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
