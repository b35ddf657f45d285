"""The faults: one wrong piece of text each, and the test that must go red over it.

A fault is (what is wrong, the text as it stands, the text with the fault). The old text must occur exactly once in its
file, so a change of the code that moves it makes the table fail instead of silently testing nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Change = tuple[str, str, str, str]  # parameters of the test, what is wrong, old text, new text


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Args:
        file: of the package, under fastft/.
        what: what is wrong with it.
        old: the text as it stands.
        new: the text with the fault.
        test: the node id of the test that must fail.
        interpreted: whether it is a Triton kernel's fault, judged in Triton's interpreter.
    """

    file: str
    what: str
    old: str
    new: str
    test: str
    interpreted: bool


def _faults(file: str, test: str, changes: Sequence[Change], *, interpreted: bool = False) -> Iterator[Fault]:
    """Faults of one file. `test` is the usual test; a change whose parameters contain "::" names its own."""
    for where, what, old, new in changes:
        yield Fault(file, what, old, new, where if "::" in where else f"{test}{where}", interpreted)


_RMS = "tests/kernels/test_rms_norm.py::test_output_and_gradients_are_as_good_as_stock"
_ROPE = "tests/kernels/test_rope.py::test_rotation_and_its_backward_are_as_good_as_stock"
_SWIGLU = "tests/kernels/test_swiglu.py::test_product_and_gradients_are_as_good_as_stock"
_NF4 = "tests/kernels/test_nf4.py::test_equals_the_format_spelled_out"
_JOIN = "tests/kernels/test_join.py::test_the_matrix_is_weights_scaled_b_and_a"
_CE = "tests/kernels/test_cross_entropy.py::test_statistics_and_gradient_are_as_good_as_stock"
_CE_BACKWARD = "tests/kernels/test_cross_entropy.py::test_backward_from_recomputed_logits_is_as_good_as_stock"
_FUNCTIONAL = "tests/test_functional.py::test_"
_PROJECTION = "tests/autograd/test_lora_linear.py::test_gradients_are_the_derivatives"
_MLP = "tests/autograd/test_mlp_half.py::test_gradients_are_the_derivatives"
_ATTENTION = "tests/autograd/test_attention_half.py::test_attention_in_gradients_are_the_derivatives"
_LAYER = "tests/autograd/test_decoder_layer.py::test_gradients_are_the_derivatives"
_SPARSE = "tests/kernels/test_sparse_product.py::test_"
_SKIP = "tests/patching/test_skip_probabilities.py::test_"
_LOSS = "tests/autograd/test_linear_cross_entropy.py::test_loss_and_its_derivatives_in_float64"
_FALLBACKS = "tests/patching/test_fallbacks.py::test_"

_KERNELS = [
    *_faults(
        "kernels/rms_norm.py",
        _RMS,
        [
            ("[residual-(300, 33)-float32-llama]", "epsilon left out", "/ hidden + eps)  #", "/ hidden)  #"),
            (
                "[residual-(300, 33)-float32-llama]",
                "residual subtracted",
                "(values + added).to(",
                "(values - added).to(",
            ),
            (
                "[plain-(3, 5, 97)-float32-llama]",
                "mean over the block, not the row",
                "tl.sum(values * values, axis=1) / hidden",
                "tl.sum(values * values, axis=1) / BLOCK",
            ),
            (
                "[plain-(3, 5, 97)-float32-gemma]",
                "Gemma's 1 + w left out",
                "scale += 1.0\n    result =",
                "scale += 0.0\n    result =",
            ),
            (
                "tests/kernels/test_rms_norm.py::test_offsets_past_2_to_the_31_c17",
                "row offsets in 32 bits",
                "row = tl.program_id(0).to(tl.int64) * ROWS",
                "row = tl.program_id(0) * ROWS",
            ),
            (
                "[plain-(300, 33)-float32-llama]",
                "backward: sign of the projection",
                "(weighted - normalized * projection) * inverse",
                "(weighted + normalized * projection) * inverse",
            ),
            (
                "[plain-(300, 33)-float32-llama]",
                "backward: 1/rms left out",
                "(weighted - normalized * projection) * inverse",
                "(weighted - normalized * projection)",
            ),
            (
                "[residual-(300, 33)-float32-llama]",
                "backward: the residual's gradient dropped",
                "result += past.to(tl.float32)",
                "result += 0.0",
            ),
            (
                "[plain-(300, 33)-float32-llama]",
                "backward: weight gradient of the weighted gradient",
                "weight_grad += grad * normalized",
                "weight_grad += weighted * normalized",
            ),
            (
                "[plain-(300, 33)-float32-llama]",
                "backward: rows of the first block again",
                "row = first_row + block * ROWS",
                "row = first_row + 0 * ROWS",
            ),
            (
                "[plain-(300, 33)-float32-llama]",
                "backward: partial sums into one row",
                "partial + tl.program_id(0).to(tl.int64) * hidden",
                "partial + tl.program_id(0).to(tl.int64) * 0",
            ),
        ],
        interpreted=True,
    ),
    *_faults(
        "kernels/rms_norm.py",
        "tests/kernels/test_rms_norm.py::test_backward_is_the_derivative_in_float64",
        [
            ("[plain-llama]", "twin: epsilon left out", "keepdim=True) + eps)", "keepdim=True))"),
            (
                "[plain-llama]",
                "twin: sum for mean in the projection",
                "(weighted * normalized).mean(",
                "(weighted * normalized).sum(",
            ),
            ("[plain-gemma]", "twin: Gemma's 1 + w left out", "weight.to(dtype) + 1.0 if", "weight.to(dtype) if"),
        ],
    ),
    *_faults(
        "kernels/rope.py",
        _ROPE,
        [
            (
                "[angles per row-(2, 5, 3, 1, 10)-float32]",
                "sign of the first half",
                "first_cos - second_sin",
                "first_cos + second_sin",
            ),
            (
                "[angles per row-(2, 5, 3, 1, 10)-float32]",
                "sign of the second half",
                "second_cos + first_sin",
                "second_cos - first_sin",
            ),
            (
                "tests/kernels/test_rope.py::test_inverse_is_the_transpose_even_where_the_halves_differ",
                "the other half's sine",
                "first * cos_first, first * sin_second",
                "first * cos_first, first * sin_first",
            ),
            (
                "[shared angles-(2, 5, 3, 1, 10)-float32]",
                "the backward turns forward",
                "= -sin_second, -sin_first",
                "= sin_second, sin_first",
            ),
            (
                "[angles per row-(2, 5, 3, 1, 10)-float32]",
                "angles of the first batch row for all",
                "batch * angle_strides[0] + token * angle_strides[1]",
                "token * angle_strides[1]",
            ),
            (
                "[shared angles-(2, 5, 3, 1, 10)-float32]",
                "every token's keys are the first token's",
                "batch * k_strides[0] + token * k_strides[1]",
                "batch * k_strides[0] + token * 0",
            ),
            (
                "tests/kernels/test_rope.py::test_offsets_past_2_to_the_31_c17",
                "token offsets in 32 bits",
                "token = tl.program_id(0).to(tl.int64) % sequence",
                "token = tl.program_id(0) % sequence",
            ),
        ],
        interpreted=True,
    ),
    *_faults(
        "kernels/rope.py",
        _FUNCTIONAL,
        [
            (
                "rope_gradcheck[per row]",
                "twin: sign in the backward",
                "first * cos_first + second * sin_second",
                "first * cos_first - second * sin_second",
            ),
            (
                "rope_gradcheck[per row]",
                "twin: the other half's sine",
                "second * cos_second + first * sin_second",
                "second * cos_second + first * sin_first",
            ),
            (
                "tests/kernels/test_rope.py::test_partial_rotary_copies_the_rest[out of place-float32]",
                "twin: columns past the rotary ones lost",
                "out[..., rotary:] = x[..., rotary:]",
                "out[..., rotary:] = 0",
            ),
        ],
    ),
    *_faults(
        "kernels/swiglu.py",
        _SWIGLU,
        [
            (
                "[(3, 5, 173)-float32]",
                "sign inside the sigmoid",
                "gate_value / (1.0 + tl.exp(-gate_value))",
                "gate_value / (1.0 + tl.exp(gate_value))",
            ),
            (
                "[(3, 5, 173)-float32]",
                "up added, not multiplied",
                "    activated = activated.to(gate.dtype.element_ty).to(tl.float32)\n    result = activated * up_value",
                "    activated = activated.to(gate.dtype.element_ty).to(tl.float32)\n    result = activated + up_value",
            ),
            (
                "[(2, 3, 1100)-float32]",
                "every block of columns is the first",
                "% blocks_per_row) * BLOCK",
                "% blocks_per_row) * 0",
            ),
            (
                "tests/kernels/test_swiglu.py::test_offsets_past_2_to_the_31_c17",
                "row offsets in 32 bits",
                "// blocks_per_row).to(tl.int64) * ROWS",
                "// blocks_per_row) * ROWS",
            ),
            (
                "[(3, 5, 173)-float32]",
                "backward: second term of silu's derivative dropped",
                "grad_activated * sigmoid * (1.0 + gate_value * (1.0 - sigmoid))",
                "grad_activated * sigmoid",
            ),
            (
                "[(3, 5, 173)-float32]",
                "backward: sign in silu's derivative",
                "gate_value * (1.0 - sigmoid))",
                "gate_value * (1.0 + sigmoid))",
            ),
            (
                "[(3, 5, 173)-float32]",
                "backward: up's gradient by the sigmoid alone",
                "up_result = grad_value * activated",
                "up_result = grad_value * sigmoid",
            ),
        ],
        interpreted=True,
    ),
    *_faults(
        "kernels/swiglu.py",
        _FUNCTIONAL,
        [
            (
                "swiglu_gradcheck",
                "twin: up's gradient by the gate",
                "grad_up = grad * activated",
                "grad_up = grad * gate",
            ),
            ("swiglu_gradcheck", "twin: up missing in the gate's gradient", "(grad * up, gate)", "(grad, gate)"),
            (
                "tests/kernels/test_swiglu.py::test_backward_is_the_derivative_in_float64",
                "twin: the product of the gradient",
                "product = activated.mul_(up)",
                "product = activated.mul_(grad)",
            ),
        ],
    ),
    *_faults(
        "kernels/nf4.py",
        _NF4,
        [
            ("[(97, 13)-float32-flat]", "nibbles exchanged", "tl.interleave(high, low)", "tl.interleave(low, high)"),
            ("[(97, 13)-float32-flat]", "low nibble twice", "nibbles >> 4", "nibbles & 15"),
            (
                "[(97, 13)-float32-flat]",
                "scale of the block before",
                "scale = tl.load(absmax + block, mask=block_mask",
                "scale = tl.load(absmax + block // 2, mask=block_mask",
            ),
            ("[(97, 13)-float32-nested]", "offset of nested scales dropped", "* outer + tl.load(offset)", "* outer"),
            (
                "tests/kernels/test_nf4.py::test_more_scales_than_one_nested_block",
                "outer scale of the first block for all",
                "absmax_scale + block // ABSMAX_BLOCK",
                "absmax_scale + block * 0",
            ),
        ],
        interpreted=True,
    ),
    *_faults(
        "kernels/nf4.py",
        _NF4,
        [
            (
                "[(97, 13)-float32-nested]",
                "twin: offset of nested scales subtracted",
                "* scales + weight.offset",
                "* scales - weight.offset",
            ),
            (
                "[(97, 13)-float32-flat]",
                "twin: the last, partial block unscaled",
                "values[whole * weight.blocksize : elements] *= absmax[whole]",
                "values[whole * weight.blocksize : elements] *= 1.0",
            ),
            (
                "tests/kernels/test_nf4.py::test_more_scales_than_one_nested_block",
                "twin: outer scales tiled, not repeated",
                "weight.absmax_scale.repeat_interleave(weight.absmax_blocksize)",
                "weight.absmax_scale.repeat(weight.absmax_blocksize)",
            ),
        ],
    ),
    *_faults(
        "kernels/fold.py",
        "tests/kernels/test_join.py::test_adapters_folded_into_the_weights",
        [
            (
                "[float32-query, key, value-32]",
                "scale left out of s·B·A",
                "other=0.0).to(tl.float32) * scale",
                "other=0.0).to(tl.float32)",
            ),
            (
                "[float32-query, key, value-32]",
                "every tile takes the first columns of A",
                "* WIDTH + column[None, :], mask=(rank < RANK)",
                "* WIDTH + (column - first_column)[None, :], mask=(rank < RANK)",
            ),
            (
                "tests/kernels/test_join.py::test_folding_any_rank[70]",
                "only the first ranks are added",
                "for start in range(0, RANK, RANK_BLOCK):",
                "for start in range(0, RANK_BLOCK, RANK_BLOCK):",
            ),
        ],
        interpreted=True,
    ),
    *_faults(
        "kernels/join.py",
        _JOIN,
        [
            (
                "[float32-query, key, value-32-nested]",
                "the second member's rows on top of the first's",
                "target = matrix + STRIDE * ROWS[0]\n",
                "target = matrix\n",
            ),
            (
                "[float32-query, key, value-32-nested]",
                "the third member's block of B in the second's columns",
                "row_2, column_2 = row - ROWS[0] - ROWS[1], column - RANKS[0] - RANKS[1]",
                "row_2, column_2 = row - ROWS[0] - ROWS[1], column - RANKS[1]",
            ),
            (
                "[float32-one-32-nested]",
                "scale left out of sB",
                "_b_block(lora_b[0], row, column, ROWS[0], RANKS[0]) * scales[0]",
                "_b_block(lora_b[0], row, column, ROWS[0], RANKS[0])",
            ),
            (
                "[float32-ranks past one tile of columns-40-nested]",
                "a block that ends inside a row goes on in it",
                "(element // WIDTH) * STRIDE + element % WIDTH",
                "element",
            ),
            (
                "[float32-query, key, value-32-nested]",
                "A under its own weight instead of under all",
                "target = matrix + STRIDE * (ROWS[0] + ROWS[1] + ROWS[2])",
                "target = matrix + STRIDE * (ROWS[0] + ROWS[1])",
            ),
        ],
        interpreted=True,
    ),
    *_faults(
        "kernels/cross_entropy.py",
        _CE,
        [
            (
                "[(7, 97)-plain-float32]",
                "columns past the vocabulary counted",
                'z = tl.where(in_row, z, float("-inf"))',
                "z = tl.where(in_row, z, 0.0)",
            ),
            (
                "[(19, 1500)-plain-float32]",
                "running sum not rescaled to a new maximum",
                "sum_exp = sum_exp * rescale",
                "sum_exp = sum_exp * 1.0",
            ),
            (
                "[(19, 1500)-plain-float32]",
                "entropy's running sum not shifted",
                "(sum_weighted + sum_exp * shift[:, None]) * rescale",
                "sum_weighted * rescale",
            ),
            (
                "[(19, 1500)-plain-float32]",
                "squares rescaled once",
                "sum_squares * rescale * rescale",
                "sum_squares * rescale",
            ),
            (
                "[(7, 97)-plain-float32]",
                "label's term halved in the gradient",
                "gradient -= tl.where(is_target, 1.0, 0.0)",
                "gradient -= tl.where(is_target, 0.5, 0.0)",
            ),
            (
                "[(7, 97)-scaled-float32]",
                "gradient without dz/dx",
                'gradient * slope, float("nan"))',
                'gradient, float("nan"))',
            ),
            (
                "[(7, 97)-smoothed-float32]",
                "uniform part of the smoothed label dropped",
                "gradient -= tl.where(is_target, 1.0 - label_smoothing, 0.0) + label_smoothing / vocabulary",
                "gradient -= tl.where(is_target, 1.0 - label_smoothing, 0.0)",
            ),
            (
                "[(7, 97)-capped-float32]",
                "slope of the cap",
                "slope * (1.0 - tanh * tanh)",
                "slope * (1.0 - tanh)",
            ),
            (
                "tests/kernels/test_cross_entropy.py::"
                "test_of_equal_logits_the_lowest_index_is_top1[ties within a block]",
                "a tie ahead of the target forgotten",
                "(beaten == 0) & (tied == 0)",
                "(beaten == 0)",
            ),
            (
                "tests/kernels/test_cross_entropy.py::"
                "test_a_target_outside_the_vocabulary_is_nan_and_nothing_else_is_c08[float32]",
                "a target outside the vocabulary has a loss",
                'target_z = tl.where(in_range, target_z, float("nan"))',
                "target_z = target_z + 0.0",
            ),
            (
                "tests/kernels/test_cross_entropy.py::test_offsets_past_2_to_the_31_c17",
                "row offsets in 32 bits",
                "row_offset = rows.to(tl.int64) * row_stride",
                "row_offset = rows * row_stride",
            ),
        ],
        interpreted=True,
    ),
    *_faults(
        "kernels/cross_entropy.py",
        _CE_BACKWARD,
        [
            ("[both-plain-float32]", "backward: sign of p", "(label - p)", "(label + p)"),
            (
                "[entropy only-plain-float32]",
                "backward: entropy missing in its own gradient",
                "(centred + offset[:, None])",
                "centred",
            ),
            ("[both-scaled-float32]", "backward: without dz/dx", "(gradient * slope).to(", "gradient.to("),
            (
                "[log_probs only-plain-float32]",
                "backward: the maximum for the log-sum",
                "log_sum = tl.load(statistics + 2 * statistic_stride",
                "log_sum = tl.load(statistics + statistic_stride",
            ),
        ],
        interpreted=True,
    ),
    *_faults(
        "kernels/cross_entropy.py",
        _LOSS,
        [
            ("[mean-frozen-everything-hard labels]", "twin: slope of the cap", "(1.0 - tanh.square())", "(1.0 - tanh)"),
            (
                "[mean-frozen-plain-smoothed]",
                "twin: the label's full weight under smoothing",
                "p.gather(1, index) - (1.0 - label_smoothing)",
                "p.gather(1, index) - 1.0",
            ),
            (
                "tests/autograd/test_linear_cross_entropy.py::"
                "test_log_probs_and_entropy_derivatives_in_float64[entropy-frozen-plain]",
                "twin: the log-sum missing in the entropy's gradient",
                ".add_(entropy - log_sum)",
                ".add_(entropy)",
            ),
        ],
    ),
    *_faults(
        "functional.py",
        _FUNCTIONAL,
        [
            (
                "swiglu_gradcheck",
                "gate's and up's gradient exchanged",
                "return grad_gate if ctx.needs_input_grad[0] else None, grad_up if ctx.needs_input_grad[1] else None",
                "return grad_up if ctx.needs_input_grad[0] else None, grad_gate if ctx.needs_input_grad[1] else None",
            ),
            (
                "rope_gradcheck[shared angles]",
                "the backward turns forward",
                "rope(grad_q, grad_k, cos, sin, inverse=True, heads_first=True)",
                "rope(grad_q, grad_k, cos, sin, inverse=False, heads_first=True)",
            ),
            (
                "rms_norm_gradcheck[gemma]",
                "the backward in another mode",
                "inverse_rms, mode=ctx.mode",
                'inverse_rms, mode="llama"',
            ),
        ],
    ),
]

_AUTOGRAD = [
    *_faults(
        "autograd/products.py",
        _PROJECTION,
        [
            (
                "tests/autograd/test_lora_linear.py::test_outputs_are_the_formula[one]",
                "separate, forward: scale left out",
                "part.addmm_(low_rank[:, column:end], lora_b.t(), alpha=projection.scale)",
                "part.addmm_(low_rank[:, column:end], lora_b.t())",
            ),
            (
                "tests/autograd/test_lora_linear.py::test_outputs_are_the_formula[three of different widths and ranks]",
                "separate, forward: everyone reads the first adapter's columns",
                "lora_b.t(), alpha=projection.scale)\n                column = end",
                "lora_b.t(), alpha=projection.scale)\n                column = 0",
            ),
            (
                "[one-plain]",
                "separate: scale left out of U",
                "addmm_(part, lora_b, beta=0, alpha=projection.scale)",
                "addmm_(part, lora_b, beta=0)",
            ),
            (
                "[one-plain]",
                "separate: scale left out of dB",
                "low_rank[:, column:end], beta=0, alpha=projection.scale)",
                "low_rank[:, column:end], beta=0)",
            ),
            (
                "[one-plain]",
                "separate: the adapter's part of dX dropped",
                "            self.add_low_rank(grad_x, grad_low_rank)\n",
                "            pass\n",
            ),
            (
                "[trained base-plain]",
                "sign of dW",
                "found[LEAVES * index] = torch.mm(part.t(), x)",
                "found[LEAVES * index] = -torch.mm(part.t(), x)",
            ),
            (
                "[three of different widths and ranks-plain]",
                "separate: dX of the last projection alone",
                "else grad_x.addmm_(part, weight)",
                "else torch.mm(part, weight)",
            ),
            ("[trained biases-plain]", "mean for sum in db", ".sum(0, dtype=sum_dtype(", ".mean(0, dtype=sum_dtype("),
            (
                "[three of different widths and ranks-plain]",
                "rows of dA cut at the wrong place",
                "grad_a[row:end]\n        row = end",
                "grad_a[row:end]\n        row = 0",
            ),
            (
                "[4 bits, different ranks-plain]",
                "joined: blocks of dB cut at the wrong place",
                "row, column = end, stop",
                "row, column = end, 0",
            ),
            (
                "[4 bits, nested-plain]",
                "joined: scale left out of dB",
                "block if projection.scale == 1.0 else block * projection.scale",
                "block",
            ),
            (
                "[4 bits, flat, biases-plain]",
                "joined: the adapter's part of dX dropped",
                "return self.add_low_rank(grad_x, grad_low_rank), grad_low_rank",
                "return grad_x, grad_low_rank",
            ),
            (
                "tests/autograd/test_lora_linear.py::test_outputs_are_the_formula[4 bits, nested]",
                "joined, forward: the adapter dropped",
                "y.addmm_(low_rank, matrix[: self._out, width:].t())",
                "pass",
            ),
            (
                "tests/autograd/test_products.py::test_room_for_the_adapters_changes_no_value[(3, None, 2)-joined]",
                "joined: X Aᵀ computed and not left where the product reads it",
                "self.low_rank(x[:, :width], x[:, width:])",
                "self.low_rank(x[:, :width])",
            ),
            (
                "tests/autograd/test_products.py::test_folded_adapters_are_the_joined_ones[(3, None, 2)-False]",
                "folded: dY·B by the wrong columns",
                "torch.mm(grad, matrix[:, self._width :])",
                "torch.mm(grad, matrix[:, : matrix.shape[1] - self._width])",
            ),
            (
                "tests/autograd/test_products.py::test_folded_adapters_are_the_joined_ones[(3, None, 2)-True]",
                "folded: no dB",
                "if self._rank and any(needs_leaves[3::LEAVES]):",
                "if self.columns and any(needs_leaves[3::LEAVES]):",
            ),
            (
                "tests/autograd/test_products.py::test_the_products_of_a_forward_serve_its_backward",
                "joined: X Aᵀ made again from the wrong columns",
                "                low_rank = self.low_rank(x)\n",
                "                low_rank = x @ self._matrix[: self.columns, : self._width].t()\n",
            ),
            (
                "tests/autograd/test_products.py::test_leaf_gradients_of_tiles_add_up_in_float32",
                "gradients of tiles summed in 16 bits",
                "total[i] = grad.to(sum_dtype(grad.dtype))",
                "total[i] = grad",
            ),
        ],
    ),
    *_faults(
        "autograd/lora_linear.py",
        _PROJECTION,
        [
            (
                "tests/autograd/test_lora_linear.py::"
                "test_an_adapter_changed_between_forward_and_backward_raises[lora_a]",
                "stale adapters: a change before the backward goes unseen",
                "ctx.save_for_backward(rows, low_rank, *leaves)",
                "ctx.save_for_backward(rows, low_rank, *(None if t is None else t.detach().clone() for t in leaves))",
            ),
            (
                "tests/autograd/test_lora_linear.py::test_an_unused_output_counts_as_zero",
                "an unused output counts as one",
                "part.zero_()",
                "part.fill_(1.0)",
            ),
        ],
    ),
    *_faults(
        "autograd/autocast.py",
        _PROJECTION,
        [
            (
                "[one-autocast]",
                "autocast rounds float64",
                "self.enabled and dtype != torch.float64",
                "self.enabled",
            ),
            (
                "tests/autograd/test_attention_half.py::test_attention_runs_under_the_autocast_of_the_call",
                "attention without its autocast",
                "return torch.autocast(self.device_type, self.dtype)",
                "return contextlib.nullcontext()",
            ),
        ],
    ),
    *_faults(
        "autograd/mlp_half.py",
        _MLP,
        [
            (
                "tests/autograd/test_mlp_half.py::test_output_is_the_formula[adapters]",
                "forward: gate and up exchanged",
                "swiglu(both[:, :intermediate], both[:, intermediate:], out=product)",
                "swiglu(both[:, intermediate:], both[:, :intermediate], out=product)",
            ),
            (
                "[adapters-plain]",
                "gradients of gate and up exchanged",
                "out=(grad_product, gate, up))",
                "out=(grad_product, up, gate))",
            ),
            (
                "[4 bits, different ranks-plain]",
                "the down adapter's gradients from the gate",
                "down.leaf_grads(room, low_rank_grad, product, down_low_rank, needs_down)",
                "down.leaf_grads(room, low_rank_grad, gate, down_low_rank, needs_down)",
            ),
            (
                "tests/autograd/test_mlp_half.py::test_what_a_forward_saved_survives_its_backward",
                "kept activations written over",
                "both = gate_up.grad_room(tokens)  # G",
                "both = gate_up.grad_room(tokens) if saved is None else saved.gate_up  # G",
            ),
            (
                "tests/autograd/test_mlp_half.py::test_tiles_add_up[5-True]",
                "every tile's gradient into the first rows",
                "None if grad_x is None else grad_x[part],",
                "None if grad_x is None else grad_x[: part.stop - part.start],",
            ),
            (
                "tests/autograd/test_mlp_half.py::test_tiles_add_up[5-True]",
                "adapters' gradients of the last tile alone",
                "add_leaf_grads(leaf_grads, tile)",
                "leaf_grads = tile",
            ),
            (
                "tests/autograd/test_mlp_half.py::test_tiles_add_up[12-False]",
                "the rest of the tokens forgotten",
                "yield slice(start, min(start + rows, tokens))",
                "yield slice(start, min(start + rows, tokens - tokens % rows))",
            ),
            (
                "tests/autograd/test_mlp_half.py::test_gate_and_up_made_again_change_no_bit",
                "gate and up made again from other rows",
                "_, low_rank = gate_up.forward(x, both[:, : 2 * intermediate])",
                "_, low_rank = gate_up.forward(x.flip(0), both[:, : 2 * intermediate])",
            ),
        ],
    ),
    *_faults(
        "autograd/attention_half.py",
        _ATTENTION,
        [
            (
                "tests/autograd/test_attention_half.py::"
                "test_attention_in_is_norm_projections_and_rotation[an angle row per batch row]",
                "forward: turned backward",
                "rope(query, key, cos, sin, out=(query, key))",
                "rope(query, key, cos, sin, inverse=True, out=(query, key))",
            ),
            (
                "[adapters]",
                "backward: turned forward",
                "inverse=True, out=(grad_query",
                "inverse=False, out=(grad_query",
            ),
            (
                "[adapters]",
                "the residual's gradient dropped",
                "residual_grad=residual_grad,",
                "residual_grad=None,",
            ),
            (
                "[Qwen3's head norms]",
                "the key's head norm by the query's weight",
                "saved.key_raw, head_norms[1], saved.key_inverse_rms",
                "saved.key_raw, head_norms[0], saved.key_inverse_rms",
            ),
            (
                "[adapters]",
                "dA from rows that were not normalized",
                "normed, _ = normed_rows(rows, norm, qkv)",
                "normed = rows",
            ),
            (
                "[adapters]",
                "gradients of key and value exchanged",
                "grad_query, grad_key, grad_value = heads.cut(room, batch, sequence)",
                "grad_query, grad_value, grad_key = heads.cut(room, batch, sequence)",
            ),
            (
                "tests/autograd/test_attention_half.py::"
                "test_attention_in_leaf_gradients_without_an_input_gradient[trained norms]",
                "a trained norm over a frozen input gets no gradient",
                "qkv.input_grad(room, needs_x or needs_norms[0])",
                "qkv.input_grad(room, needs_x)",
            ),
            (
                "tests/autograd/test_attention_half.py::test_the_attention_graph_is_freed_by_its_backward",
                "attention's graph kept after its backward",
                "    attended.graph = None\n",
                "",
            ),
            (
                "tests/autograd/test_attention_half.py::test_attention_backward_is_autograds",
                "heads not put back in the projection's layout",
                "tuple(g.transpose(1, 2) for g in grads)",
                "tuple(g.reshape(g.transpose(1, 2).shape) for g in grads)",
            ),
        ],
    ),
    *_faults(
        "autograd/stretches.py",
        "tests/autograd/test_stretches.py::test_every_storage_is_there_once_and_every_view_comes_back",
        [
            (
                "",
                "every view at its storage's start",
                "as_strided(v.shape, v.stride, v.offset)",
                "as_strided(v.shape, v.stride, 0)",
            ),
            ("", "a storage moved once for each of its views", "if storage.data_ptr() not in found:", "if True:"),
        ],
    ),
    *_faults(
        "autograd/attention_half.py",
        "tests/autograd/test_decoder_layer.py::test_",
        [
            (
                "attention_runs_twice_where_saved_tensor_hooks_are_forbidden",
                "hooks where they are forbidden",
                "if not torch._C._autograd._saved_tensors_hooks_is_enabled():",
                "if False:",
            ),
        ],
    ),
    *_faults(
        "autograd/emptied_graph.py",
        "tests/autograd/test_emptied_graph.py::test_",
        [
            (
                "nothing_large_is_held_before_and_after_a_backward[fused]",
                "Q, K and V held from one backward to the next",
                "                slots.given, slots.kept = before",
                "                pass",
            ),
            (
                "two_backwards_may_be_under_way_at_once",
                "a thread's backward empties another's",
                "with slots.lock:",
                "if True:",
            ),
            (
                "a_backward_inside_another_leaves_it_what_it_was_given",
                "a backward empties the one around it",
                "before = slots.given, slots.kept",
                "before = ((), ())",
            ),
            (
                "an_output_so_small_that_it_stays_goes_with_its_owner[fused]",
                "a cycle through autograd's node",
                "return tensor.detach()",
                "return tensor",
            ),
            (
                "many_small_tensors_are_as_much_as_a_large_one",
                "small tensors each for itself",
                "if self._small + held <= _SMALL:",
                "if held <= _SMALL:",
            ),
            (
                "a_small_view_does_not_hold_the_large_tensor_it_is_of",
                "a view taken for what it shows",
                "held = tensor.untyped_storage().nbytes()",
                "held = tensor.nbytes",
            ),
            (
                "there_is_no_graph_where_attention_saves_what_host_memory_does_not_take[elsewhere]",
                "tensors of other devices kept",
                "_dense(tensor) and tensor.device == flat.device",
                "_dense(tensor)",
            ),
            (
                "an_output_with_gaps_between_its_rows_is_kept_without_them",
                "an output with gaps",
                ".to(query.dtype).contiguous()",
                ".to(query.dtype)",
            ),
            (
                "nothing_large_is_held_before_and_after_a_backward[fused]",
                "the graph begins at leaves",
                "return tuple(tensor.detach() for tensor in tensors)",
                "ctx.held = tensors\n        return tuple(tensor.detach() for tensor in tensors)",
            ),
            (
                "gradients_are_attention_s_own_to_the_bit_however_often_it_is_refilled[a function of its own-dtype0]",
                "Q, K and V given back in a layout of their own",
                "return tensors[self.place].as_strided(self.shape, self.stride)",
                "return tensors[self.place].view(self.shape)",
            ),
            (
                "scores_are_not_held_until_attention_returns",
                "whatever attention saves is held",
                "if sum(other.nbytes for other in self._others) > self._most:",
                "if False:",
            ),
            (
                "there_is_no_graph_where_attention_saves_more_than_its_output[output copied]",
                "the output kept twice",
                "return kept if sum(tensor.nbytes for tensor in kept) <= self._most else None",
                "return kept",
            ),
        ],
    ),
    *_faults(
        "autograd/decoder_layer.py",
        _LAYER,
        [
            (
                "tests/autograd/test_decoder_layer.py::test_output_is_the_layers_formula[Llama-keep]",
                "forward: the second residual dropped",
                "y.add_(h) if y.dtype == h.dtype",
                "y if y.dtype == h.dtype",
            ),
            (
                "tests/autograd/test_decoder_layer.py::test_output_is_the_layers_formula[Llama-recompute]",
                "forward: the first residual dropped",
                "residual=rows,",
                "residual=None,",
            ),
            (
                "[Llama-keep]",
                "the second residual's gradient dropped",
                "residual_grad=grad,",
                "residual_grad=None,",
            ),
            (
                "[norms trained-keep]",
                "gradients of the two norms exchanged",
                "[norm_grads[0], grad_post,",
                "[grad_post, norm_grads[0],",
            ),
            (
                "[Llama-lean]",
                "lean: the second norm made again from x",
                "normed_rows(saved.h, call.post_norm, gate_up)",
                "normed_rows(rows, call.post_norm, gate_up)",
            ),
            (
                "[Llama-recompute]",
                "recomputation hands on the wrong normalized rows",
                "normed = made.normed\n",
                "normed = made.normed_h\n",
            ),
            (
                "tests/autograd/test_decoder_layer.py::test_recompute_keeps_the_input_and_nothing_else",
                "level recompute keeps everything",
                'keeps_attention = level in ("keep", "lean")',
                "keeps_attention = True",
            ),
            (
                "tests/autograd/test_decoder_layer.py::test_recompute_keeps_the_input_and_nothing_else",
                "level lean keeps gate and up",
                'keep_mlp=level == "keep", attend',
                "keep_mlp=keeps_attention, attend",
            ),
            (
                "tests/autograd/test_decoder_layer.py::test_a_leaf_changed_between_forward_and_backward_raises[keep]",
                "stale adapters: a change before the backward goes unseen",
                "ctx.save_for_backward(kept_x, cos, sin, *leaves, *kept)",
                "ctx.save_for_backward("
                "kept_x, cos, sin, *(None if t is None else t.detach().clone() for t in leaves), *kept)",
            ),
            (
                "tests/autograd/test_decoder_layer.py::test_a_backward_writes_to_nothing_it_was_given[keep]",
                "the incoming gradient written over",
                "out=target if x.dtype == dtype else None,",
                "out=grad,",
            ),
        ],
    ),
    *_faults(
        "autograd/linear_cross_entropy.py",
        _LOSS,
        [
            (
                "[mean-frozen-plain-hard labels]",
                "sign of the gradient",
                "grad_loss = grad_log_probs.neg()",
                "grad_loss = grad_log_probs",
            ),
            (
                "[mean-frozen-plain-hard labels]",
                "labels of the first chunk for all",
                "targets[start:end],\n            write_gradient",
                "targets[: end - start],\n            write_gradient",
            ),
            (
                "[none-frozen-plain-hard labels]",
                "incoming gradients of the wrong rows",
                "else scale.index_select(0, index)",
                "else scale[:count]",
            ),
            (
                "[mean-frozen-plain-hard labels]",
                "every chunk's hidden gradient into the first rows",
                "_hidden_gradient(logits, weight, statics, grad_rows[start:end])",
                "_hidden_gradient(logits, weight, statics, grad_rows[: end - start])",
            ),
            (
                "[none-trained-plain-hard labels]",
                "recomputing: incoming gradients of the wrong rows",
                "grad_log_probs = None if grad_log_probs is None else grad_log_probs.index_select(0, index)",
                "grad_log_probs = None if grad_log_probs is None else grad_log_probs[: index.shape[0]]",
            ),
            (
                "[none-trained-plain-hard labels]",
                "recomputing: statistics of the first chunk for all",
                "statistics[:, part],",
                "statistics[:, : end - start],",
            ),
            (
                "[mean-frozen-plain-hard labels]",
                "the ignored rows, not the others",
                "descending=True, stable=True",
                "descending=False, stable=True",
            ),
            (
                "tests/autograd/test_linear_cross_entropy.py::test_accumulation_equals_one_batch_c03[frozen head]",
                "a given count is not divided by",
                "divisor = outputs.counted if num_items_in_batch is None else num_items_in_batch",
                "divisor = outputs.counted",
            ),
            (
                "tests/autograd/test_linear_cross_entropy.py::test_bad_labels_are_named_c08[grad-23-0]",
                "a label beyond the vocabulary let through",
                "if lowest < 0 or highest >= vocabulary:",
                "if lowest < 0 or highest > vocabulary:",
            ),
        ],
    ),
]

_PATCHING = [
    *_faults(
        "autograd/room.py",
        "tests/autograd/test_room.py::test_",
        [
            (
                "behind_the_logits_is_zero[torch.bfloat16]",
                "what was in memory lies behind the rows",
                'if more and buffer.device.type == "cpu":',
                'if more and buffer.device.type == "cuda":',
            ),
        ],
    ),
    *_faults(
        "patching/walks.py",
        "tests/patching/test_walks.py::test_",
        [
            (
                "parameters_are_the_same_in_the_same_order[lora]",
                "children from the last to the first",
                "stack.extend(reversed(children.values()))",
                "stack.extend(children.values())",
            ),
            (
                "parameters_are_the_same_in_the_same_order[tied]",
                "a tied weight twice",
                "if parameter is not None and id(parameter) not in found:",
                "if parameter is not None:",
            ),
            (
                "the_count_of_parameters_is_transformers[nf4-{'only_trainable': 0, 'exclude_embeddings': 0}]",
                "one weight a byte",
                "(2 * parameter.element_size() if",
                "(parameter.element_size() if",
            ),
            (
                "the_count_of_parameters_is_transformers[dense-{'only_trainable': 0, 'exclude_embeddings': 1}]",
                "embeddings counted",
                'name == "weight" and isinstance(module, nn.Embedding)',
                'name == "bias" and isinstance(module, nn.Embedding)',
            ),
            (
                "a_module_with_ways_of_its_own_is_asked_itself",
                "a module's own train is passed over",
                "if not flag_alone(module):",
                'if "train" in attributes:',
            ),
            (
                "a_module_with_ways_of_its_own_is_asked_itself",
                "a module's own walk is passed over",
                'if not _is_torchs(module, "named_modules"):',
                'if "named_modules" in attributes:',
            ),
            (
                "a_train_that_another_library_puts_on_transformers_is_called",
                "another library's train is passed over",
                "if not known or not isinstance(mode, bool)",
                "if not isinstance(mode, bool)",
            ),
            (
                "a_plain_model_is_answered_by_what_it_inherits",
                "a plain model's parameters are walked",
                "if not recurse or not _is_planned(self) or",
                "if not recurse or",
            ),
        ],
    ),
    *_faults(
        "patching/registry.py",
        "tests/patching/test_walks.py::test_",
        [
            (
                "unpatch_leaves_the_classes_as_they_were",
                "what was added stays",
                "delattr(patch.owner, patch.name)",
                "pass",
            ),
        ],
    ),
    *_faults(
        "patching/backbone.py",
        "tests/patching/test_walks.py::test_",
        [
            (
                "peft_that_comes_after_patching_is_met_at_the_next_forward",
                "peft that comes later is not met",
                "walks.install_on_peft()",
                "pass",
            ),
        ],
    ),
    *_faults(
        "patching/levels.py",
        "tests/patching/test_levels.py::test_",
        [
            (
                "what_graphs_keep_is_the_step_s_own_for_their_shape_alone[another]",
                "any graphs are taken for the batch's own",
                "serves = captured is not None and captured.serves(shape[0] * shape[1])",
                "serves = captured is not None",
            ),
        ],
    ),
    *_faults(
        "patching/size_plans.py",
        "tests/patching/test_levels.py::test_",
        [
            (
                "graphs_of_another_shape_go_where_there_is_no_plan_beside_them",
                "idle graphs stay where there is no plan beside them",
                "if not plan.fits and release is not None:",
                "if plan.fits and release is not None:",
            ),
        ],
    ),
    *_faults(
        "patching/warm.py",
        "tests/patching/test_warm.py::test_",
        [
            (
                "jobs_keep_the_tensors_they_began_with",
                "a job reads the parameter itself",
                "lora_a=alias(projection.lora_a)",
                "lora_a=projection.lora_a",
            ),
        ],
    ),
    *_faults(
        "autograd/head_products.py",
        _LOSS,
        [
            (
                "[mean-trained, bias-plain-hard labels]",
                "bias gradient of the last chunk alone",
                "grad_bias.add_(gradient.sum(",
                "grad_bias.copy_(gradient.sum(",
            ),
            (
                "[mean-trained-plain-hard labels]",
                "weight gradient of the last chunk alone",
                "add_product(grad_weight[columns], gradient[:, columns].t(), rows)",
                "grad_weight[columns] = gradient[:, columns].t() @ rows",
            ),
        ],
    ),
    *_faults(
        "patching/approximations.py",
        "tests/patching/test_approximations.py::test_",
        [
            (
                "folded_adapters_run_are_listed_and_are_switched_off",
                "an approximation is never switched off",
                "setattr(site, attribute, name in wanted)",
                "setattr(site, attribute, True)",
            ),
        ],
    ),
    *_faults(
        "patching/peft.py",
        _FALLBACKS,
        [
            (
                "rslora_is_fast[keep]",
                "stale adapters: scaling not read",
                'return lora_a, lora_b, lora["scaling"][name]',
                "return lora_a, lora_b, 2.0",
            ),
            (
                "a_disabled_adapter_is_the_base[dense]",
                "stale adapters: disabling not seen",
                'if lora["_disable_adapters"]:',
                "if False:",
            ),
            (
                "switching_between_two_adapters",
                "stale adapters: always the first",
                "names = [n for n in ([active] if isinstance(active, str) else active) if n in a_modules]",
                "names = list(a_modules)[:1]",
            ),
            (
                "dropout_of_another_kind_runs_stock[module1]",
                "every dropout taken for torch's own",
                "if not drops or type(dropout) is not nn.Dropout or p >= 1:",
                "if not drops:",
            ),
            (
                "lora_dropout_is_fast_in_training[keep-32]",
                "dropout left out",
                "                if p > 0:\n",
                "                if False:\n",
            ),
            (
                "a_merged_adapter_is_fast",
                "stale adapters: a merge not seen",
                'if lora["merged_adapters"]:',
                "if False:",
            ),
            (
                "tests/patching/test_peft.py::test_a_4bit_weight_exchanged_after_a_forward_is_seen",
                "a packed weight remembered beyond its time",
                "if known is None or known[0]() is not weight or known[1] is not state or known[2] != pointer:",
                "if known is None:",
            ),
        ],
    ),
    *_faults(
        "patching/causal_lm.py",
        "tests/patching/test_causal_lm.py::test_",
        [
            (
                "nothing_is_added_to_cross_entropy",
                "labels not shifted",
                "nn.functional.pad(labels[..., 1:], (0, 1), value=IGNORE_INDEX)",
                "labels",
            ),
            (
                "a_document_s_first_token_is_no_target_of_the_one_before[lora-no mask]",
                "a document's first token predicted from the one before",
                "labels = labels.masked_fill(starts.to(labels.device), IGNORE_INDEX)",
                "pass",
            ),
        ],
    ),
]

_PLANNER = "tests/memory/test_planner.py::test_"
_OFFLOAD = "tests/memory/test_offload.py::test_"
_LEVELS = "tests/patching/test_levels.py::test_"
_GRAPHS = "tests/memory/test_graphs.py::test_"
_PACKED_GRAPHS = "tests/memory/test_packed_graphs.py::test_"
_TOKEN_GRAPHS = "tests/memory/test_token_graphs.py::test_"

_MEMORY = [
    *_faults(
        "memory/planner.py",
        _PLANNER,
        [
            (
                "a_plan_is_the_best_of_all[True]",
                "the working memory of a recomputing layer forgotten",
                "recompute = a * saved[0] + (b - a) * saved[1] + (fixed_before[b - 1] + working[1])",
                "recompute = a * saved[0] + (b - a) * saved[1] + fixed_before[b - 1]",
            ),
            (
                "a_plan_keeps_its_promises",
                "the loss forgotten",
                "return max(peak, held + loss_working)",
                "return peak",
            ),
            (
                "the_layers_that_save_most_come_last",
                "the best levels first",
                "for level, count in zip(_BY_DEPTH, counts, strict=True) for _ in range(count)]",
                "for level, count in reversed([*zip(_BY_DEPTH, counts, strict=True)]) for _ in range(count)]",
            ),
        ],
    ),
    *_faults(
        "memory/away.py",
        "tests/memory/test_away.py::test_",
        [
            (
                "what_goes_to_host_memory_is_what_the_link_carries_and_pays[shape4-32768-32768-attention]",
                "what the link carries counted by the products alone",
                "6.0 * hidden * intermediate + attention",
                "6.0 * hidden * intermediate",
            ),
            (
                "more_in_host_memory_is_less_time[32768]",
                "what is on its way back for the layer before not counted",
                "arriving = 2 * stream + (0 if late(longest) else further)",
                "arriving = 2 * stream",
            ),
        ],
    ),
    *_faults(
        "memory/costs.py",
        _LEVELS,
        [
            (
                "tests/memory/test_costs.py::test_long_batches_hold_one_tile_of_the_mlp",
                "the MLP's tensors counted for every token",
                "rows = tile_rows(tokens, shape.intermediate, e, compact)",
                "rows = tokens",
            ),
        ],
    ),
    *_faults(
        "patching/size_plans.py",
        _LEVELS,
        [
            (
                "many_processes_of_a_host_do_not_send_halves",
                "every process's link kept busy",
                "or _processes() <= _MOST_HALVES]",
                "or True]",
            ),
            (
                "named_offload_sends_away_what_the_host_has_room_for[input]",
                "host memory asked for that is not there",
                'if count * one.levels["offload"].host <= room]',
                "]",
            ),
        ],
    ),
    *_faults(
        "memory/offload.py",
        _OFFLOAD,
        [
            (
                "what_was_added_is_fetched_with_its_parcel_or_when_that_is_asked_for[False]",
                "what nobody wants early fetched early",
                "if previous._added_ahead:",
                "if True:",
            ),
            (
                "buffers_of_other_sizes_go_where_the_host_has_no_room_beside_them",
                "buffers of all sizes kept",
                "while self._free and self.host_bytes + size > limit:",
                "while False:",
            ),
            (
                "buffers_of_other_sizes_go_where_the_host_has_no_room_beside_them",
                "buffers of other sizes given back though there is room",
                "while self._free and self.host_bytes + size > limit:",
                "while self._free:",
            ),
            (
                "what_was_added_is_no_link_of_the_chain",
                "the chain broken by what was added",
                "self._store._send(tensors, None)",
                "self._store._send(tensors, None)\n            self._store._latest = None",
            ),
            (
                "what_is_added_together_counts_as_one_on_its_way_out",
                "let go when the first of two copies is done",
                "last = parcels[-1]",
                "last = parcels[0]",
            ),
            (
                "a_copy_out_waits_for_what_makes_the_tensor",
                "copied out before it is made",
                "lanes.out.wait_stream(torch.cuda.current_stream(tensor.device))",
                "pass",
            ),
            (
                "a_reused_buffer_waits_for_its_last_copy",
                "a buffer reused while it is read",
                "lanes.out.wait_event(buffer.last_use[0])",
                "pass",
            ),
            (
                "a_copy_back_waits_for_its_memory_and_its_copy_out",
                "copied back before it is out",
                "back.wait_event(self._copied)",
                "pass",
            ),
            (
                "a_get_starts_the_parcel_before_it_and_no_other",
                "nothing fetched ahead",
                "previous._arrival = previous._copy_back()",
                "pass",
            ),
        ],
    ),
    *_faults(
        "memory/token_graphs.py",
        _TOKEN_GRAPHS,
        [
            (
                "replayed_tokens_are_the_eager_ones[settings0-llama]",
                "the residual stream of the capture for every token",
                "shared.x.copy_(x)",
                "pass",
            ),
            (
                "replayed_tokens_are_the_eager_ones[settings0-llama]",
                "the angles of the capture for every token",
                "shared.angles.load(cos, sin)",
                "pass",
            ),
            (
                "a_changed_adapter_is_captured_anew[scaled]",
                "a changed layer is replayed",
                "if graphs is None or graphs.key != key:",
                "if graphs is None:",
            ),
            (
                "another_number_of_rows_is_captured_anew_in_a_pool_of_its_own",
                "the pool of a layer whose graphs are gone",
                "            self._graphs.pop(layer, None)\n",
                "",
            ),
            (
                "inference_mode_and_no_grad_take_turns",
                "buffers of inference mode outside of it",
                "x.device, torch.is_inference_mode_enabled())\n        graphs",
                "x.device)\n        graphs",
            ),
            (
                "hidden_states_handed_out_are_copies",
                "the buffer itself is handed out",
                "return shared.y.clone()",
                "return shared.y",
            ),
            (
                "a_second_thread_in_the_middle_of_a_layer_runs_eagerly",
                "buffers taken by two threads",
                "if not self._taken.acquire(blocking=False):",
                "self._taken.acquire(blocking=False)\n        if False:",
            ),
            (
                "a_cache_may_keep_what_it_is_given",
                "keys handed out where the next token writes",
                "key=self._into.key.clone()",
                "key=self._into.key",
            ),
        ],
    ),
    *_faults(
        "patching/warm.py",
        "tests/patching/test_warm.py::test_",
        [
            (
                "what_a_config_says_is_what_the_layer_is[llama-False]",
                "as many key heads as query heads",
                "config.num_key_value_heads * head_dim",
                "config.num_attention_heads * head_dim",
            ),
            (
                "the_first_step_waits_for_what_began_before_the_weights",
                "two threads compile the same kernel",
                "        wait(after)\n",
                "",
            ),
        ],
    ),
    *_faults(
        "memory/captures.py",
        _PACKED_GRAPHS,
        [
            (
                "each_step_has_boundaries_of_its_own[llama-settings0-keep]",
                "the boundaries of the capture for every step",
                "        if self._loaded is documents:\n",
                "        if self._loaded is not None:\n",
            ),
            (
                "fewer_documents_than_there_is_room_for_and_rows_of_their_own",
                "boundaries of the step before in the room that is left",
                "self._buffer[count:].fill_(documents.rows * documents.length)",
                "pass",
            ),
            (
                "a_load_is_no_write_to_what_a_capture_saved",
                "a load counted as a write to what attention saved",
                "self._buffer = buffer.data",
                "self._buffer = buffer",
            ),
        ],
    ),
    *_faults(
        "memory/graphs.py",
        _PACKED_GRAPHS,
        [
            (
                "one_layer_that_waits_for_its_backward_reads_its_own_forward_s_boundaries[keep]",
                "free layers replayed while another's backward has boundaries to read",
                "if self._waiting or graph.busy:",
                "if graph.busy:",
            ),
            (
                "more_or_longer_documents_run_eagerly_until_there_is_room[lengths1]",
                "longer documents than the capture was for",
                "seen = (len(documents.lengths), documents.longest)",
                "seen = (len(documents.lengths), 1)",
            ),
            (
                "each_step_has_boundaries_of_its_own[llama-settings0-keep]",
                "the documents of the capture baked in",
                "        if shared.boundaries is not None and isinstance(call.attention, DocumentAttention):\n",
                "        if False:\n",
            ),
        ],
    ),
    *_faults(
        "memory/row_lengths.py",
        _PACKED_GRAPHS,
        [
            (
                "rows_are_as_long_as_the_longest_was_and_beyond_the_limit_their_own",
                "short rows are made alike in as many shapes as there are multiples",
                "            return self._longest\n",
                "            return alike\n",
            ),
            (
                "rows_are_as_long_as_the_longest_was_and_beyond_the_limit_their_own",
                "rows filled though the device is what a step waits for",
                "self._worth(fills, alike_length(tokens), device)",
                "self._worth(pays, alike_length(tokens), device)",
            ),
            (
                "one_odd_batch_among_equal_ones_makes_no_difference",
                "one odd batch is enough",
                "self._varies = 2 * most <= len(self._rows)",
                "self._varies = most < len(self._rows)",
            ),
            (
                "rows_are_left_alone_where_their_like_is_not_replayed",
                "rows as long as one that was offloaded",
                "        if self._barred:  # rows as long as that are not replayed: shorter ones may be\n"
                "            self._longest = 0\n",
                "",
            ),
            (
                "rows_are_left_alone_where_their_like_is_not_replayed",
                "tried again at once, every second step",
                "self._pause = _PAUSE if self._barred else max(0, self._pause - 1)",
                "self._pause = 0",
            ),
        ],
    ),
    *_faults(
        "patching/documents.py",
        _PACKED_GRAPHS,
        [
            (
                "lines_of_like_lengths_are_made_alike[input_ids]",
                "what is added is the first document",
                "(*documents.lengths, more)",
                "(more, *documents.lengths)",
            ),
            (
                "lines_of_like_lengths_are_made_alike[input_ids]",
                "what is added comes out",
                "return hidden[:, :size].reshape(",
                "return hidden[:, -size:].reshape(",
            ),
            (
                "what_is_added_stands_at_position_0",
                "what is added stands where the longest text would end",
                "functional.pad(positions, (0, more))",
                "functional.pad(positions, (0, more), value=length)",
            ),
            (
                "short_rows_of_any_length_are_replayed_as_one[padded-left-keep]",
                "a batch gets the first tokens of its lengthened row back",
                "hidden[0, : len(padding.tokens)]",
                "hidden[0, -len(padding.tokens) :]",
            ),
        ],
    ),
    *_faults(
        "memory/captures.py",
        _TOKEN_GRAPHS,
        [
            (
                "a_changed_adapter_is_captured_anew[moved]",
                "addresses are not compared",
                "(leaf.data_ptr(), leaf.shape, leaf.dtype, leaf.requires_grad)",
                "(leaf.shape, leaf.dtype, leaf.requires_grad)",
            ),
            (
                "inference_mode_and_no_grad_take_turns",
                "versions asked of tensors that count none",
                "counted = not (cos.is_inference() or sin.is_inference())",
                "counted = True",
            ),
        ],
    ),
    *_faults(
        "patching/levels.py",
        _TOKEN_GRAPHS,
        [
            (
                "training_gives_the_graphs_back",
                "graphs of a generation that is over are kept",
                "    if backbone in _token_graphs:  # generation",
                "    if False:  # generation",
            ),
        ],
    ),
    *_faults(
        "memory/graphs.py",
        _GRAPHS,
        [
            (
                "replays_give_the_eager_bits[keep]",
                "x of the capture for every step",
                "self._x.copy_(x)",
                "pass",
            ),
            (
                "lora_dropout_draws_new_masks_at_every_replay[keep]",
                "the masks of the capture for every step",
                "            self._seed.copy_(call.seed)\n",
                "            pass\n",
            ),
            (
                "gradients_are_the_trainers_own",
                "gradients handed out where the next replay writes",
                "zip(self._flat.clone().split(",
                "zip(self._flat.split(",
            ),
            (
                "layers_are_captured_in_the_order_of_a_step",
                "backwards captured from the first layer on",
                "for graph in reversed(list(self._graphs.values())):",
                "for graph in list(self._graphs.values()):",
            ),
            (
                "a_retained_graph_gives_the_same_gradients_twice",
                "attention's graph given up by the first backward",
                "self._attended.retain = True",
                "self._attended.retain = False",
            ),
            (
                "a_second_forward_before_the_backward_runs_eagerly[keep]",
                "buffers taken twice",
                "        if self._waiting or graph.busy:\n",
                "        if False:\n",
            ),
            (
                "one_layer_changed_captures_all_anew",
                "a changed step is not captured again",
                "self._last != self._captured and not self._failed",
                "not self._captured and not self._failed",
            ),
            (
                "gradients_in_evaluation_mode_are_eager_and_leave_no_trace",
                "forwards outside of training counted as one endless step",
                "self._called.add(id(layer))",
                "pass",
            ),
        ],
    ),
    *_faults(
        "patching/size_plans.py",
        _LEVELS,
        [
            (
                "where_nothing_fits_the_host_is_not_overdrawn_for_more_than_x[59-input]",
                "where nothing fits, host memory does not count",
                "max(0, plan.host - host_budget)",
                "0.0",
            ),
            (
                "a_step_above_the_budget_is_planned_again",
                "what a step used is not learned from",
                "memory.correction += error",
                "pass",
            ),
            (
                "offload_that_leaves_no_room_for_what_graphs_keep_does_without_them",
                "what graphs keep counts as let go",
                "kept = sum(levels[level].saved for level in plan.levels)",
                "return False",
            ),
            (
                "gradients_of_an_earlier_micro_batch_are_in_the_plan",
                "gradients that a forward finds are left out of its plan",
                "if not memory.accumulates and _finds_gradients(layers):",
                "if False:",
            ),
            (
                "two_graphs_alive_at_once",
                "a second graph alive is not noticed",
                "return rest > known.start and rest + known.above > known.plan.budget",
                "return False",
            ),
            (
                "buffers_that_graphs_will_take_are_in_the_plan",
                "the graphs' buffers left out",
                "start += buffers",
                "pass",
            ),
            (
                "small_tiles_where_they_let_better_levels_fit",
                "small tiles never chosen",
                "return min(plans, key=rank)",
                "return plans[0]",
            ),
            (
                "statistics_that_are_reset_after_a_step_lose_nothing",
                "a peak read too late",
                "memory.seen = torch.cuda.max_memory_allocated(device)",
                "memory.seen = None",
            ),
        ],
    ),
    *_faults(
        "patching/decoder_layer.py",
        _LEVELS,
        [
            (
                "small_tiles_where_they_let_better_levels_fit",
                "small tiles planned and not run",
                "call.compact, call.observer = site.compact,",
                "call.compact, call.observer = False,",
            ),
            (
                "what_is_in_host_memory_comes_back_when_the_plan_has_room_for_it[256-False]",
                "what is in host memory comes back early, whatever was planned",
                "call.late = site.late",
                "call.late = False",
            ),
        ],
    ),
    *_faults(
        "patching/levels.py",
        _LEVELS,
        [
            (
                "the_store_is_settled_by_the_layer_after_the_last_offload",
                "nobody settles the store",
                'if level == "offload" or before == "offload":',
                'if level == "offload":',
            ),
            (
                "naming_other_levels_asks_anew_whether_the_host_has_room",
                "room for one layer taken for room for all",
                "asked = (size, count,",
                "asked = (size,",
            ),
            (
                "the_last_layer_needs_no_room_in_host_memory",
                "room asked for a layer that recomputes",
                'levels[:-1].count("offload")',
                'levels.count("offload")',
            ),
        ],
    ),
]

_DATA_RESPONSES = "tests/data/test_responses.py::test_"
_DATA_MARKERS = "tests/data/test_markers.py::test_"
_DATA_CHECK = "tests/data/test_check.py::test_"

_DATA = [
    *_faults(
        "data/responses.py",
        _DATA_RESPONSES,
        [
            (
                "an_answer_cut_at_a_documents_end_does_not_run_into_the_next",
                "packed documents read as one",
                'row.get("seq_lengths") or [length]',
                "[length]",
            ),
            (
                "a_tokenizer_that_loses_white_space",
                "a token that only touches an answer is trained",
                "end > spans[current][0]",
                "end >= spans[current][0]",
            ),
            (
                "twice_is_once_and_what_was_masked_stays_masked",
                "labels that were masked are trained again",
                'before = row.get("labels")',
                "before = None",
            ),
            (
                "half_is_the_most_that_may_be_empty",
                "rows without an answer pass",
                "if empty * 2 > total:",
                "if empty > total:",
            ),
        ],
    ),
    *_faults(
        "data/markers.py",
        _DATA_MARKERS,
        [
            (
                "an_end_with_its_whitespace_cut_off_is_still_an_end",
                "the end of a turn is left out of the answer",
                "finish = end.end()",
                "finish = end.start()",
            ),
            (
                "words_of_an_instruction_inside_an_answer_do_not_end_it",
                "plain words end an answer",
                "if instruction and (not ends or _has(instruction, special)) else ()",
                "if instruction else ()",
            ),
            (
                "the_response_marker_leaves_thinking_to_the_answer",
                "a thinking block of the prompt is part of the marker",
                "if marker and all(marker in before for before in befores):",
                "if marker:",
            ),
            (
                "trls_training_templates_train_what_trl_trains[gptoss]",
                "the call of a tool ends like an answer",
                "end = (*end, *(closing if markers.instruction or _after(whole, ANSWER[1]).strip() else opening))",
                "pass",
            ),
            (
                "an_answers_reasoning_is_part_of_it",
                "answers with reasoning are not looked at",
                "befores += _before_reasoning(render)",
                "pass",
            ),
        ],
    ),
    *_faults(
        "data/decoded.py",
        "tests/data/test_decoded.py::test_",
        [
            (
                "the_first_word_of_a_row_keeps_the_space_it_has_elsewhere",
                "a token is spelled as if it were a row's first",
                "text = self._decode(self._anchor + tokens)",
                "text = self._decode(tokens)",
            ),
        ],
    ),
    *_faults(
        "data/check.py",
        _DATA_CHECK,
        [
            (
                "each_mistake_has_its_warning",
                "a label on the first token counts as trained",
                "zip(input_ids[1:], labels[1:], strict=True)",
                "zip(input_ids, labels, strict=True)",
            ),
            (
                "it_leaves_the_trainer_and_the_random_state_as_they_were",
                "the loader stays with accelerate",
                "del registered[known:]",
                "pass",
            ),
        ],
    ),
]

_SKIPPED_COLUMNS = [
    *_faults(
        "kernels/sparse_product.py",
        _SPARSE,
        [
            (
                "a_kept_entry_is_strictly_above_the_threshold_whatever_its_sign",
                "large negative entries dropped",
                "tl.abs(value.to(tl.float32)) <= threshold",
                "value.to(tl.float32) <= threshold",
            ),
            (
                "a_kept_entry_is_strictly_above_the_threshold_whatever_its_sign",
                "a NaN lost",
                "tl.where(tl.abs(value.to(tl.float32)) <= threshold, 0, 1)",
                "tl.where(tl.abs(value.to(tl.float32)) > threshold, 1, 0)",
            ),
            (
                "the_kept_columns_product_is_as_good_as_stock[ragged block-float32]",
                "the list one place off",
                "columns + start + position - 1, column",
                "columns + start + position - 1, column + 1",
            ),
            (
                "each_block_has_its_own_columns",
                "the first block's columns for all",
                "start_of_list = block.to(tl.int64) * vocabulary",
                "start_of_list = block.to(tl.int64) * 0",
            ),
            (
                "the_kept_columns_product_is_as_good_as_stock[whole block-float32]",
                "G not moved together",
                "tl.load(target + column[None, :]",
                "tl.load(target + index[None, :]",
            ),
            (
                "what_lies_behind_a_row_never_comes_in[stride of 8s]",
                "no zeros behind the last kept column",
                "value, mask=row_mask & (index < padded)[None, :]",
                "value, mask=row_mask & (index < count)[None, :]",
            ),
            (
                "rows_beyond_two_to_the_31_elements",
                "32-bit row offsets",
                "target = gradient + row.to(tl.int64)[:, None] * row_stride",
                "target = gradient + (row[:, None] * row_stride).to(tl.int32)",
            ),
        ],
        interpreted=True,
    ),
    *_faults(
        "kernels/sparse_product.py",
        _SPARSE,
        [
            (
                "float64_takes_the_twin_and_keeps_its_input",
                "G made positive on the way",
                "block.to(wide).abs() <= threshold",
                "block.to(wide).abs_() <= threshold",
            ),
            (
                "blocks_that_keep_all_or_nothing",
                "one list for all rows",
                "for columns in kept_columns(block, threshold)",
                "for columns in kept_columns(gradient[:ROW_BLOCK], threshold)",
            ),
        ],
    ),
    *_faults(
        "autograd/linear_cross_entropy.py",
        "tests/autograd/test_skipped_columns.py::test_",
        [
            (
                "the_gradient_lacks_the_small_columns_and_nothing_else[mean-scaled]",
                "the threshold on G, not on P - Y",
                "statics.skip_below * slope, out=out",
                "statics.skip_below, out=out",
            ),
            (
                "where_it_does_not_apply_the_product_is_whole_and_the_reason_is_told[trained head]",
                "columns left out of G before the head's own gradient",
                "    if statics.trains_head:\n        return",
                "    if False:\n        return",
            ),
            (
                "where_it_does_not_apply_the_product_is_whole_and_the_reason_is_told[softcap]",
                "one threshold for slopes that differ",
                "if statics.softcap is not None:",
                "if False:",
            ),
        ],
    ),
    *_faults(
        "patching/trl.py",
        _SKIP,
        [
            (
                "trls_road_skips_and_reads_the_plan_at_call_time",
                "TRL's road not told",
                "            **skip_arguments(site),\n",
                "",
            ),
        ],
    ),
    *_faults(
        "patching/causal_lm.py",
        _SKIP,
        [("the_models_own_loss_skips", "the model's own loss not told", "        **skip_arguments(site),\n", "")],
    ),
    *_faults(
        "patching/registry.py",
        _SKIP,
        [
            (
                "the_report_says_why_a_loss_was_whole_until_one_is_not",
                "an old reason reported for ever",
                "self.whole_product = whole_product",
                "self.whole_product = whole_product or self.whole_product",
            ),
        ],
    ),
]

_DOCUMENTS = "tests/patching/test_documents.py::test_"
_PACKED = f"{_DOCUMENTS}a_packed_loss_is_the_token_weighted_mean_of_separate_ones_c27_c28"

_PACKING = [
    *_faults(
        "kernels/document_attention.py",
        "tests/kernels/test_document_attention.py::test_",
        [
            (
                "equals_one_mask_over_the_row[1-2-4]",
                "a window one token too wide",
                "causal & (columns > rows - window)",
                "causal & (columns >= rows - window)",
            ),
            (
                "varlen_gets_the_boundaries_and_the_window[4-newest]",
                "varlen's window counts the query itself",
                "-1 if window is None else window - 1, 0",
                "-1 if window is None else window, 0",
            ),
            (
                "equals_one_mask_over_the_row[1-2-None]",
                "tokens brought back from the wrong bucket",
                "filled += index.numel()",
                "filled += int(inside.sum())",
            ),
            (
                "equals_one_mask_over_the_row[1-2-None]",
                "attention to the padding that follows",
                "attn_mask=mask, is_causal=mask is None",
                "attn_mask=mask, is_causal=False",
            ),
            (
                "starts_become_documents",
                "a row that goes on in the next",
                "starts[:, 0] = True",
                "starts[0, 0] = True",
            ),
        ],
    ),
    *_faults(
        "patching/documents.py",
        _DOCUMENTS,
        [
            (
                f"{_PACKED}[1-all-ones mask-sdpa]",
                "an all-ones mask hides the documents",
                "    if mask is not None:\n        # The mask's",
                "    if mask is not None:\n        return None\n        # The mask's",
            ),
            (
                f"{_PACKED}[2-positions-flash_x]",
                "flash is told of the first row's documents alone",
                "ends = documents.boundaries\n        kwargs",
                "ends = documents.boundaries[: len(documents.lengths) // documents.rows + 1]\n        kwargs",
            ),
            (
                "windows_hold_inside_documents[qwen2-sdpa]",
                "a sliding layer gets the full mask",
                'masks["sliding_attention"] = make(window)',
                'masks["sliding_attention"] = make(None)',
            ),
            (
                "padding_left_out_changes_no_loss_and_no_gradient_c26[left-llama]",
                "rows of a padded batch see each other",
                "Documents(1, count, tuple(n for n in lengths if n), tokens.device)",
                "Documents(1, count, (count,), tokens.device)",
            ),
        ],
    ),
    *_faults(
        "patching/causal_lm.py",
        _DOCUMENTS,
        [
            (
                f"{_PACKED}[1-boundaries alone-sdpa]",
                "the first token of a document stays a target",
                "labels.flatten().index_fill(0, starts, IGNORE_INDEX)",
                "labels.flatten()",
            ),
            (
                "padding_runs_where_somebody_could_see_it[logits]",
                "logits of pads that nobody computed",
                "wanted, site.padding_free = site.padding_free, False",
                "wanted = site.padding_free",
            ),
        ],
    ),
    *_faults(
        "patching/backbone.py",
        _DOCUMENTS,
        [
            (
                "padding_runs_where_somebody_could_see_it[evaluation]",
                "padding left out in evaluation",
                "if module.training and not cached:",
                "if not cached:",
            ),
        ],
    ),
    *_faults(
        "patching/backbone.py",
        _PACKED_GRAPHS,
        [
            (
                "full_batches_without_a_mask_are_rows_too",
                "full batches stay as they are",
                "not row_lengths.fills(count, given.device)",
                "True",
            ),
            (
                "batches_that_are_always_alike_are_left_as_they_are",
                "full batches are made rows for nothing",
                "(row_lengths is None or not row_lengths.fills(count, given.device))",
                "False",
            ),
        ],
    ),
    *_faults(
        "patching/attention.py",
        "tests/patching/test_attention.py::test_",
        [
            (
                "cudnn_is_first_where_a_plan_is_used_again_or_pays_at_once[ragged-Hopper]",
                "a plan for every length",
                "_CUDNN_FIRST if plans else _FLASH_FIRST",
                "_CUDNN_FIRST",
            ),
        ],
    ),
    *_faults(
        "kernels/backend.py",
        "tests/kernels/test_backend.py::test_",
        [
            (
                "launch_keys_are_as_fine_as_tritons",
                "kernels of aligned tensors launched over others",
                "add(argument.data_ptr() & 15)",
                "add(0)",
            ),
            (
                "launch_keys_are_as_fine_as_tritons",
                "a 32-bit kernel launched over wide strides",
                "(argument & 15) + 16 * (-0x80000000 <= argument <= 0x7FFFFFFF)",
                "argument & 15",
            ),
            (
                "arguments_cannot_pass_for_one_another",
                "what is absent leaves no trace in the key",
                "        if argument is None:\n            add(None)\n",
                "        if argument is None:\n            continue\n",
            ),
        ],
    ),
    *_faults(
        "kernels/rows.py",
        "tests/kernels/test_swiglu.py::test_offsets_past_2_to_the_31_c17",
        [
            (
                "",
                "rows that lie apart read as if they were next to each other",
                "return tensor, tensor.stride(0)",
                "return tensor, tensor.shape[1]",
            ),
        ],
        interpreted=True,
    ),
    *_faults(
        "bench/timing.py",
        "tests/bench/test_timing.py::test_host_time_is_that_of_calls_after_the_first_however_many_sets[3]",
        [
            ("", "the first call after a wait counted", "        calls[0]()\n        start", "        start"),
        ],
    ),
]

_MERGED = "tests/saving/test_merged.py::test_"
_GGUF = "tests/saving/test_gguf.py::test_"

_SAVING = [
    *_faults(
        "saving/fold.py",
        _MERGED,
        [
            (
                "c47_the_saved_model_answers_as_the_live_one[lora]",
                "the scale is dropped",
                "update = (b @ a) * scaling",
                "update = b @ a",
            ),
            (
                "c47_the_saved_model_answers_as_the_live_one[two_adapters]",
                "the first active adapter alone",
                "for adapter in _active(layer):\n        variant",
                "for adapter in _active(layer)[:1]:\n        variant",
            ),
            (
                "c47_the_saved_model_answers_as_the_live_one[dora_on_embeddings]",
                "the magnitude of an embedding across its rows",
                'across = 0 if kind == "DoraEmbeddingVariant" or',
                "across = 0 if",
            ),
            (
                "c47_the_saved_model_answers_as_the_live_one[lora_bias]",
                "the scale of a trained bias is dropped",
                "bias + layer.scaling[adapter] * trained",
                "bias + trained",
            ),
        ],
    ),
    *_faults(
        "saving/shards.py",
        _MERGED,
        [
            (
                "the_original_base_plus_the_update",
                "the original checkpoint is not read",
                "base, folded = fold(module, attribute, name, base=replacement)",
                "base, folded = fold(module, attribute, name)",
            ),
        ],
    ),
    *_faults(
        "saving/folder.py",
        "tests/saving/test_folder.py::test_a_failed_save_loses_nothing",
        [
            (
                "[second_rename]",
                "the first rename is not taken back",
                "            os.rename(old / path.name, path)\n            raise\n",
                "            raise\n",
            ),
        ],
    ),
    *_faults(
        "saving/gguf_model.py",
        _GGUF,
        [
            (
                "transformers_answers_from_the_file_as_from_the_checkpoint[llama]",
                "rows of q and k in Hugging Face's order",
                "return halves.transpose(1, 2).reshape(tensor.shape)",
                "return halves.reshape(tensor.shape)",
            ),
            (
                "llama3_divisors_are_transformers_own_frequencies",
                "the smooth share the wrong way around",
                "1 / ((1 - smooth) / factor + smooth)",
                "1 / (smooth / factor + (1 - smooth))",
            ),
        ],
    ),
]

_RUN = "tests/training/test_run.py::test_"
_GROUPS = "tests/training/test_learning_rates.py::test_"

_TRAINING = [
    *_faults(
        "training/meter.py",
        _RUN,
        [
            (
                "tokens_are_the_real_ones[False]",
                "padding is counted",
                "torch.stack((mask.count_nonzero(), mask",
                "torch.stack((torch.ones_like(mask).count_nonzero(), mask",
            ),
            (
                "batches_without_labels_are_counted",
                "a row's first label is a target",
                "(labels[..., 1:] == IGNORE_INDEX)",
                "(labels == IGNORE_INDEX)",
            ),
        ],
    ),
    *_faults(
        "training/learning_rates.py",
        _GROUPS,
        [
            (
                "loraplus_gives_b_its_ratio",
                "PEFT's weight decay instead of the arguments'",
                "loraplus_weight_decay=weight_decay, ",
                "",
            ),
            (
                "embeddings_in_modules_to_save_have_their_rate[4.0]",
                "embeddings keep the rate of the group they were in",
                '"params": moved, "lr": rate}',
                '"params": moved}',
            ),
        ],
    ),
    *_faults(
        "training/checkpoint.py",
        "tests/training/test_checkpoint.py::test_",
        [
            (
                "another_order_is_an_error_too",
                "the order of the parameters is not compared",
                'list(trained.items()) != list(now["trainable"].items())',
                'trained != now["trainable"]',
            ),
        ],
    ),
    *_faults(
        "training/run.py",
        "tests/training/test_interrupt.py::test_",
        [
            (
                "a_save_that_fails_does_not_hide_the_interrupt",
                "half a checkpoint stays",
                "            if folder.is_dir() and not _is_complete(folder):",
                "            if not folder.is_dir():",
            ),
            (
                "the_checkpoint_of_an_interrupt_resumes_to_the_straight_run",
                "saved without the step's metrics in the history",
                "self._stopping = control.should_log = True",
                "self._save_and_stop(state, control)",
            ),
        ],
    ),
]

_GENERATION = [
    *_faults(
        "patching/attention.py",
        "tests/patching/test_backbone.py::test_",
        [
            (
                "left_padded_generation[llama-dense]",
                "attention over the new keys only",
                "key, value = cache.update(key, value, layer_index, **passed)",
                "cache.update(key, value, layer_index, **passed)",
            ),
        ],
    ),
    *_faults(
        "patching/decoder_layer.py",
        "tests/patching/test_backbone.py::test_",
        [
            (
                "a_cache_asked_for_in_training_is_filled",
                "training over a cache",
                "if has_cache(kwargs) and torch.is_grad_enabled():",
                "if False:",
            ),
            (
                "the_cache_holds_what_stocks_holds[llama]",
                "every layer writes into the first one's place",
                "over_cache(attend, kwargs, attention.layer_idx, arguments)",
                "over_cache(attend, kwargs, 0, arguments)",
            ),
        ],
    ),
    *_faults(
        "memory/costs.py",
        "tests/memory/test_costs.py::test_",
        [
            (
                "gradients_come_as_backwards_end",
                "gradients of layers still to run backward count beside the loss",
                "saved=max(0, cost.saved - gradients)",
                "saved=cost.saved",
            ),
        ],
    ),
]

_GGUF_TYPES: tuple[Fault, ...] = (
    *_faults(
        "saving/quantizers/packing.py",
        "tests/saving/test_quantizers.py::test_no_more_is_lost_than_by_llama_cpp",
        [
            (
                "[q4_k]",
                "the top bits of the later scales are another's",
                "sc[:, :4] | (sc[:, 4:] >> 4) << 6",
                "sc[:, :4] | (sc[:, 4:] >> 5) << 6",
            ),
            (
                "[q3_k]",
                "the high bits of a row's weights in the order of the weights",
                "bits.view(-1, 8, 32) << torch.arange(8, dtype=torch.uint8).view(1, 8, 1)",
                "bits.view(-1, 32, 8).mT << torch.arange(8, dtype=torch.uint8).view(1, 8, 1)",
            ),
        ],
    ),
    *_faults(
        "saving/quantizers/search.py",
        "tests/saving/test_quantizers.py::test_no_more_is_lost_than_by_llama_cpp",
        [
            (
                "[q5_k]",
                "the slope as if there were no minimum",
                "slope = (sum_qy - fitted * sum_q) / sum_qq",
                "slope = sum_qy / sum_qq",
            ),
            (
                "[q3_k]",
                "the grid through the extremes alone",
                "for step in _SYMMETRIC_STEPS:",
                "for step in (0.0,):",
            ),
        ],
    ),
    *_faults(
        "saving/quantizers/__init__.py",
        "tests/saving/test_quantizers.py::",
        [
            (
                "test_importance_moves_the_error_to_where_it_costs_less[q4_k]",
                "importance is not used",
                "if importance is None else importance.expand_as(part)",
                "if True else importance.expand_as(part)",
            ),
        ],
    ),
    *_faults(
        "saving/mixtures.py",
        "tests/saving/test_mixtures.py::",
        [
            ("test_types_are_llama_cpps[q4_k_m]", "another third of the layers", "% 3 == 2", "% 3 == 1"),
            (
                "test_rows_that_are_no_super_blocks_fall_back_as_in_llama_cpp",
                "a type with fewer bits takes the place of q4_k",
                '"q4_k": "q5_0", "q5_k": "q5_1"',
                '"q4_k": "q4_0", "q5_k": "q5_1"',
            ),
        ],
    ),
    *_faults(
        "saving/gguf_lora.py",
        "tests/saving/test_gguf_lora.py::test_the_file_makes_the_update_that_training_made",
        [
            ("[llama-lora]", "rows of q's B in Hugging Face's order", "reordered(name, b, inner.config)", "b"),
            (
                "[llama-patterns]",
                "the file's scale where PEFT has another",
                "pair.b * (pair.scaling / applied)",
                "pair.b",
            ),
        ],
    ),
    *_faults(
        "saving/importance.py",
        "tests/saving/test_dynamic.py::test_importance_is_that_of_gradients_and_inputs",
        [
            (
                "",
                "tokens that nothing depends on count as much",
                "weighted = squares.sum(1) @",
                "weighted = squares.sum(1).mean().expand(len(squares)) @",
            ),
            ("", "rows in Hugging Face's order", "reordered(names[target], vectors[0], config)", "vectors[0]"),
        ],
    ),
    *_faults(
        "saving/dynamic.py",
        "tests/saving/test_dynamic.py::",
        [
            (
                "test_where_one_price_of_a_byte_gives_a_choice_that_choice_is_found[0.01-0]",
                "the worst bargain first",
                "key=lambda step: -step[0]",
                "key=lambda step: step[0]",
            ),
            (
                "test_a_cost_is_what_the_formula_says",
                "the rows that were not sampled are forgotten",
                " * float(rows.sum() / some.sum().clamp_min(1e-30))",
                "",
            ),
        ],
    ),
    *_faults(
        "saving/gguf_file.py",
        _GGUF,
        [
            (
                "too_little_space_for_both_files_is_said_before_merging",
                "the disk is asked for the checkpoint alone",
                "checkpoint + budget + 64 * 2**20",
                "checkpoint + 64 * 2**20",
            ),
        ],
    ),
    *_faults(
        "saving/gguf_model.py",
        _GGUF,
        [
            (
                "what_cannot_be_written_is_refused_before_merging",
                "a window that llama.cpp does not know is passed over",
                "window < config.max_position_embeddings",
                "window < 0",
            ),
        ],
    ),
)

_OPERATORS_TEST = "tests/operators/test_operators.py::test_"

_OPERATORS = [
    *_faults(
        "operators/cross_entropy.py",
        _OPERATORS_TEST,
        [
            (
                "cross_entropy_is_torchs[mean--100-torch.float32]",
                "the masked mean's gradient divides by all rows",
                "scale = scale / counted.clamp(min=1)",
                "scale = scale / target.shape[0]",
            ),
            (
                "cross_entropy_is_torchs[sum-7-torch.float32]",
                "the gradient of the log-probability for the loss's",
                "per_row = (-scale).expand",
                "per_row = scale.expand",
            ),
            (
                "cross_entropy_is_torchs[none--100-torch.float64]",
                "ignored rows with a loss",
                "loss = loss.masked_fill(~counts, 0.0)",
                "loss = loss + 0.0",
            ),
        ],
    ),
    *_faults(
        "operators/linear_cross_entropy.py",
        _OPERATORS_TEST,
        [
            (
                "linear_cross_entropy_is_the_functional_one[masked-frozen head-none]",
                "one gradient for all tokens",
                "scale = grad.unsqueeze(-1) if grad.dim() == 1 and made is grad_rows else grad",
                "scale = grad.mean()",
            ),
            (
                "linear_cross_entropy_is_the_functional_one[whole-trained head-none]",
                "made again: the sign",
                "pair.backward(saved, grad.neg(), None)",
                "pair.backward(saved, grad, None)",
            ),
            (
                "linear_cross_entropy_is_the_functional_one[masked-trained head-none]",
                "statistics in other rows",
                "statistics[:3, positions] = kept.statistics[:3]",
                "statistics[:3, : kept.statistics.shape[1]] = kept.statistics[:3]",
            ),
        ],
    ),
    *_faults(
        "operators/rope.py",
        _OPERATORS_TEST,
        [
            (
                "rope_is_the_functional_one",
                "the backward turns on",
                "rope_op(grad_q, grad_k, cos, sin, not ctx.inverse)",
                "rope_op(grad_q, grad_k, cos, sin, ctx.inverse)",
            ),
        ],
    ),
    *_faults(
        "operators/rms_norm.py",
        _OPERATORS_TEST,
        [
            (
                "rms_norm_is_the_functional_one[gemma]",
                "the backward of another rounding",
                "inverse_rms, ctx.mode, ctx.needs_input_grad[1])",
                'inverse_rms, "llama", ctx.needs_input_grad[1])',
            ),
        ],
    ),
    *_faults(
        "operators/swiglu.py",
        _OPERATORS_TEST,
        [
            (
                "swiglu_is_the_functional_one",
                "gate and up exchanged in the backward",
                "swiglu_backward_op(grad, gate, up)",
                "swiglu_backward_op(grad, up, gate)",
            ),
        ],
    ),
    *_faults(
        "operators/lora_linear.py",
        _OPERATORS_TEST,
        [
            (
                "operators_pass_opcheck[lora_linear_4bit]",
                "the fake promises the rank unpadded",
                "padded_rank([Adapter(lora_a, lora_b, scale)])",
                "lora_a.shape[0]",
            ),
        ],
    ),
    *_faults(
        "patching/compiled.py",
        "tests/operators/test_compile.py::test_recomputation_padding_and_evaluation_under_a_compiler[recompute]",
        [
            (
                "",
                "gate and up exchanged",
                'operators.swiglu(_project(module, "gate_proj", x), _project(module, "up_proj", x))',
                'operators.swiglu(_project(module, "up_proj", x), _project(module, "gate_proj", x))',
            ),
        ],
    ),
    *_faults(
        "operators/again.py",
        "tests/operators/test_again.py::test_a_compiled_step_keeps_less_than_the_stock_model_s",
        [
            (
                "",
                "outputs are kept",
                "if torch.compiler.is_compiling() and torch.is_grad_enabled():",
                "if not torch.compiler.is_compiling() and torch.is_grad_enabled():",
            ),
            (
                "tests/operators/test_again.py::test_where_nothing_is_differentiated_or_traced_there_is_no_region",
                "a region where nothing is differentiated",
                "if torch.compiler.is_compiling() and torch.is_grad_enabled():",
                "if torch.compiler.is_compiling():",
            ),
        ],
    ),
    *_faults(
        "operators/swiglu.py",
        "tests/operators/test_again.py::test_a_compiled_step_keeps_less_than_the_stock_model_s",
        [("", "the product is kept", "made_again(swiglu_op, gate, up)", "swiglu_op(gate, up)")],
    ),
    *_faults(
        "functional.py",
        "tests/operators/test_compile.py::"
        "test_callbacks_and_approximations_are_refused_in_a_graph_and_kept_where_it_may_break",
        [("", "callbacks are dropped in silence", "    if given:", '    if given == ["all"]:')],
    ),
]

_COMPRESSED_TESTS = "tests/saving/compressed/"
_COMPRESSED_CHECK = f"{_COMPRESSED_TESTS}test_check.py::test_"

# What needs no llm-compressor: this environment has none.
_COMPRESSED: tuple[Fault, ...] = (
    *_faults(
        "saving/compressed/schemes.py",
        f"{_COMPRESSED_TESTS}test_schemes.py::test_",
        [
            (
                "what_lies_on_the_grid_is_not_rounded",
                "4 is the largest of e2m1",
                "largest / _E2M1[-1]",
                "largest / 4.0",
            ),
            (
                "groups_are_rounded_each_by_itself",
                "one scale for all rows",
                'weight.shape[1] if group == "row"',
                'weight.numel() if group == "row"',
            ),
        ],
    ),
    *_faults(
        "saving/compressed/calibration.py",
        f"{_COMPRESSED_TESTS}test_calibration.py::test_",
        [
            (
                "a_data_set_and_a_stream_are_read_from_the_start_and_no_further",
                "rows are not cut",
                "reshape(1, -1)[:, :max_length]",
                "reshape(1, -1)",
            ),
        ],
    ),
    *_faults(
        "saving/compressed/environment.py",
        f"{_COMPRESSED_TESTS}test_environment.py::test_",
        [
            (
                "a_version_outside_is_named_with_the_range_and_the_way_out[transformers-5.24.0-<=5.17.0,>=5.15.0]",
                "ranges are not looked at",
                "if not requirement.specifier.contains(installed, prereleases=True):",
                "if not installed:",
            ),
        ],
    ),
    *_faults(
        "saving/compressed/check.py",
        _COMPRESSED_CHECK,
        [
            (
                "a_weight_further_off_than_its_format_makes_it_is_found",
                "to nearest may be as far off as GPTQ",
                '{"rtn": 1.25, "gptq": 8.0}',
                '{"rtn": 8.0, "gptq": 8.0}',
            ),
            (
                "a_file_that_answers_otherwise_than_the_model_in_memory_is_found",
                "compared with itself",
                "relative(logits - answers.quantized, answers.quantized)",
                "relative(logits - logits, answers.quantized)",
            ),
            (
                "the_share_of_the_update_is_one_or_none[1]",
                "smoothing is not taken back",
                "found.float() if ratio is None else found.float() / ratio",
                "found.float()",
            ),
            (
                "the_share_of_the_update_is_one_or_none[0]",
                "any share will do",
                "if kept is not None and not kept > 0.5:",
                "if kept is not None and not kept > -0.5:",
            ),
        ],
    ),
)

_PROBE = "tests/saving/test_probe.py::test_"
_WORKERS = "tests/saving/test_workers.py::test_"

_EXPORT: tuple[Fault, ...] = (
    *_faults(
        "saving/probe.py",
        _PROBE,
        [
            (
                "a_fault_of_one_of_224_projections_is_found[dropped]",
                "answers are compared with their own size",
                "if not replaced and not difference <= allowed:",
                "if not replaced and not difference <= 1.0:",
            ),
            (
                "a_fault_of_one_of_224_projections_is_found[scale]",
                "any share of an update will do",
                "expected, margin = shares.get(name, 1.0), (0.5",
                "expected, margin = found, (0.5",
            ),
            (
                "a_dropped_update_over_four_bits_is_found[original]",
                "merged into the original, half of a margin more",
                "(0.5 if replaced else 0.02)",
                "(1.5 if replaced else 0.02)",
            ),
            (
                "a_tensor_without_an_adapter_must_be_the_live_one_bit_by_bit",
                "tensors without an adapter are not compared",
                "_compare_bits(live, names, layout, written)\n            elif",
                "pass\n            elif",
            ),
            (
                "a_float32_save_of_a_bfloat16_model_in_4_bits_passes",
                "what 4-bit weights are multiplied in is not allowed for",
                "max(numbers.eps, self.rounding)",
                "numbers.eps",
            ),
            (
                "coarser_float32_products_are_allowed_for",
                "what TF32 does is not allowed for",
                "max(sums, self.product_error)",
                "sums",
            ),
        ],
    ),
    *_faults(
        "saving/safetensors_file.py",
        "tests/saving/test_safetensors_file.py::test_",
        [
            (
                "the_file_is_the_librarys_byte_by_byte[0]",
                "tensors in the order of their names alone",
                "key=lambda name: (_rank(name, planned[name].dtype), name)",
                "key=lambda name: (_rank(name, planned[name].dtype) * 0, name)",
            ),
            (
                "the_file_is_the_librarys_byte_by_byte[1]",
                "the header is not padded",
                'b" " * (-len(text) % 8)',
                'b" " * (-len(text) % 1)',
            ),
            (
                "a_tensor_that_is_not_as_announced_is_an_error[made1]",
                "another dtype than announced",
                "or tensor.dtype != planned[name].dtype:",
                "or False:",
            ),
        ],
    ),
    *_faults(
        "saving/workers.py",
        _WORKERS,
        [
            (
                "results_come_in_order_from_several_threads_with_one_each",
                "each thread's operations run on all",
                "torch.set_num_threads(1)",
                "torch.set_num_threads(threads)",
            ),
            (
                "an_error_comes_through_and_the_number_of_threads_is_as_before",
                "the number of threads stays 1",
                "        torch.set_num_threads(threads)\n\n\ndef",
                "        pass\n\n\ndef",
            ),
            (
                "few_results_wait",
                "results pile up",
                "if len(waiting) > ahead:",
                "if len(waiting) > 50 * ahead:",
            ),
        ],
    ),
    *_faults(
        "saving/quantizers/__init__.py",
        _WORKERS,
        [
            (
                "the_number_of_threads_makes_no_difference[q4_k]",
                "pieces as large as there are threads",
                "max(1, _PIECE // max(1, columns))",
                "max(1, torch.get_num_threads() * _PIECE // max(1, columns))",
            ),
        ],
    ),
    *_faults(
        "saving/shards.py",
        "tests/saving/test_merged.py::test_c47_the_saved_model_answers_as_the_live_one",
        [
            (
                "[lora]",
                "what is written is what was compared, in place",
                "float((some_saved.float() - some_base) @ update)",
                "float(some_saved.float().sub_(some_base) @ update)",
            ),
        ],
    ),
)

_AUTOCAST_AND_WARMING = (
    *_faults(
        "saving/fold.py",
        "tests/saving/test_probe.py::test_a_float32_save_of_a_bfloat16_model_in_4_bits_passes",
        [("", "folded under autocast", "@suspended_everywhere()  # float32 must stay float32\n", "")],
    ),
    *_faults(
        "saving/check.py",
        "tests/saving/test_probe.py::test_a_float32_model_is_saved_under_autocast_as_without",
        [("", "autocast's rounding is not allowed for", "autocast.compute_dtype(dtype) for", "dtype for")],
    ),
    *_faults(
        "saving/importance.py",
        "tests/saving/test_dynamic.py::test_importance_is_summed_in_float32_under_autocast",
        [("", "summed under autocast", "@suspended_everywhere()  #", "#")],
    ),
    *_faults(
        "saving/gguf_lora.py",
        "tests/saving/test_gguf_lora.py::test_a_file_is_checked_in_float32_under_autocast",
        [("", "compared under autocast", "@suspended_everywhere()\n", "")],
    ),
    *_faults(
        "patching/backbone.py",
        "tests/patching/test_backbone.py::test_positions_are_looked_at_once_for_a_padded_prompt_and_never_for_a_token",
        [
            (
                "",
                "positions are looked at for every token",
                "is not None and length > site.max_seq_length",
                "is not None",
            ),
            ("", "pads are counted", "int(positions.max()) + 1", "row"),
        ],
    ),
    *_faults(
        "patching/warm.py",
        "tests/patching/test_warm.py::test_matrices_are_joined_from_bfloat16_adapters_too_where_a_trainer_may_cast_them",
        [
            (
                "[QLoRA]",
                "compiled a second time for float32 adapters",
                "tensor.to(torch.bfloat16)",
                "tensor",
            ),
            ("[QLoRA]", "the output projection's matrix is left out", "(q, k, v), (o,), (gate", "(q, k, v), (gate"),
            ("[cast already]", "compiled twice for nothing", " and a.dtype == torch.float32", ""),
        ],
    ),
)

_TRACED = "tests/patching/test_traced_documents.py::test_a_compiled_graph_keeps_documents_apart_c27_c28"
_VERIFY_PACKED = "tests/test_verification.py::test_packed_documents_are_compared_with_documents_kept_apart"

_DOCUMENTS_AND_HELPERS = (
    *_faults(
        "patching/documents.py",
        _PACKED,
        [
            (
                "[1-positions that begin anywhere-sdpa]",
                "only position 0 begins a document",
                "    starts = starts_of(positions)\n    if mask is None:",
                "    starts = positions == 0\n    if mask is None:",
            ),
            (
                "[2-positions that begin anywhere, all-ones mask-sdpa]",
                "beside a mask nothing begins",
                "return starts & real & restarts.any()",
                "return starts & ~real & restarts.any()",
            ),
            (
                "tests/patching/test_documents.py::test_a_target_is_left_out_where_attention_is_kept_apart",
                "the first token behind padding is no target",
                "    real = real & functional.pad(real[:, :-1], (1, 0))  # and the token before\n",
                "",
            ),
            (
                f"{_VERIFY_PACKED}[positions]",
                "verify counts a document's first token in stock alone",
                'labels = batch["labels"].flatten().index_fill(0, starts, -100).view(rows, length)',
                'labels = batch["labels"]',
            ),
            (
                f"{_VERIFY_PACKED}[all-ones mask]",
                "verify leaves the mask that hides documents from stock",
                '{**batch, "labels": labels, "attention_mask": None, "use_cache": False}',
                '{**batch, "labels": labels, "use_cache": False}',
            ),
        ],
    ),
    *_faults(
        "patching/causal_lm.py",
        "tests/patching/test_causal_lm.py::test_a_head_trained_as_a_copy_needs_no_logits",
        [
            (
                "",
                "the loss reads the head that modules_to_save has replaced",
                "return head.modules_to_save[active[0]] if active else head.original_module",
                "return head.original_module",
            ),
            (
                "",
                "the trained head stays with adapters switched off",
                "if head.disable_adapters or any(",
                "if any(",
            ),
            (
                "",
                "a hook on the wrapper of the head is passed by",
                "if hooked(layer.__dict__) or hooked(head.__dict__):",
                "if hooked(layer.__dict__):",
            ),
        ],
    ),
    *_faults(
        "patching/traced_documents.py",
        _TRACED,
        [
            (
                "[all-ones mask-llama-settings1]",
                "a graph takes a masked row for one document",
                "allowed = (owner[:, :, None] == owner[:, None, :]) & (mask[:, None, :] != 0)",
                "allowed = (owner[:, :, None] >= owner[:, None, :]) & (mask[:, None, :] != 0)",
            ),
            (
                "[padding, one document a row-llama-settings3]",
                "a graph attends to padding",
                "allowed = (owner[:, :, None] == owner[:, None, :]) & (mask[:, None, :] != 0)",
                "allowed = owner[:, :, None] == owner[:, None, :]",
            ),
            (
                "[all-ones mask-mistral-settings5]",
                "the window of a graph is one wider",
                "(distance >= 0) & (distance < window)",
                "(distance >= 0) & (distance <= window)",
            ),
            (
                "[boundaries-llama-settings2]",
                "positions by boundaries are of the document before",
                "torch.searchsorted(boundaries, line, right=True) - 1",
                "torch.searchsorted(boundaries, line) - 1",
            ),
        ],
    ),
    *_faults(
        "data/markers.py",
        "tests/data/test_markers.py::test_",
        [
            (
                "a_question_without_an_answer_is_not_trained[mistral]",
                "a question without an answer is trained with the next",
                "elif self.end and stop and (asked",
                "elif not self.end and stop and (asked",
            ),
            (
                "a_system_turn_that_looks_like_an_answer_is_warned_of[sloppy]",
                "other turns among the answers are let pass",
                "all(word in found for word in ANSWER) and not any(word in found for word in (*USER, SYSTEM))",
                "all(word in found for word in ANSWER)",
            ),
        ],
    ),
    *_faults(
        "data/check.py",
        "tests/data/test_check.py::test_what_packing_goes_on_with_in_the_next_row_is_not_cut",
        [
            (
                "[wrapped-0]",
                "rows that packing splits count as cut",
                "len(input_ids) == self.max_length and not self.splits",
                "len(input_ids) == self.max_length",
            ),
        ],
    ),
    *_faults(
        "bench/validate/gate.py",
        "tests/bench/validate/test_gate.py::test_a_long_message_is_not_the_one_that_pytest_cut",
        [("", "a message is shown as pytest cut it", "if not message or message.endswith(CUT):", "if not message:")],
    ),
)

_DROPOUT = (
    *_faults(
        "kernels/dropout.py",
        "tests/kernels/test_dropout.py::test_",
        [
            (
                "philox_is_the_published_one",
                "the key is not raised",
                "k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD",
                "pass",
            ),
            (
                "a_part_of_the_rows_is_masked_as_in_the_whole",
                "rows counted from the part's first",
                "row = torch.arange(first_row, first_row + rows, device=x.device)[:, None]",
                "row = torch.arange(rows, device=x.device)[:, None]",
            ),
            (
                "a_share_of_p_is_dropped_and_the_rest_scaled[0.3]",
                "what is kept is not scaled",
                "* (1.0 / (1.0 - p))",
                "* 1.0",
            ),
        ],
    ),
    *_faults(
        "kernels/dropout.py",
        "tests/kernels/test_dropout.py::test_",
        [
            (
                "the_twin_has_the_same_mask_and_numbers[0.05-(3, 5, 173)-float32]",
                "the kernel's words in another order",
                "tl.join(tl.join(a, c), tl.join(b, d))",
                "tl.join(tl.join(a, b), tl.join(c, d))",
            ),
            (
                "a_part_of_the_rows_is_masked_as_in_the_whole",
                "the kernel counts rows from the part's first",
                "(first_row + row)[:, None] + zero",
                "row[:, None] + zero",
            ),
        ],
        interpreted=True,
    ),
    *_faults(
        "autograd/dropped_products.py",
        "tests/autograd/test_lora_linear.py::test_",
        [
            (
                "gradients_are_the_derivatives[dropout-plain]",
                "the gradient goes around the mask",
                "grad_x.add_(self._dropped(share, projection))",
                "grad_x.add_(share)",
            ),
            (
                "gradients_are_the_derivatives[dropout, 4 bits-plain]",
                "A's gradient is of the whole input",
                "self._dropped(x, p)) for p, start, end",
                "x) for p, start, end",
            ),
            (
                "outputs_are_the_formula[dropout, 4 bits]",
                "what was in the padding of the rank",
                "        made[:, end:].zero_()\n",
                "        made[:, end:].fill_(torch.nan)\n",
            ),
            (
                "gradients_are_the_derivatives[dropout, 4 bits-plain]",
                "U A is part of the base's product",
                "    rides_back = False\n",
                "    rides_back = True\n",
            ),
        ],
    ),
    *_faults(
        "autograd/mlp_half.py",
        f"{_FALLBACKS}lora_dropout_is_fast_in_training[keep-32]",
        [
            (
                "",
                "every tile is masked as the first",
                "down.from_row(part.start).forward(room, output[part])",
                "down.forward(room, output[part])",
            ),
            (
                "",
                "the backward's tiles are masked as the first",
                "            gate_up.from_row(part.start),\n",
                "            gate_up,\n",
            ),
        ],
    ),
    *_faults(
        "patching/decoder_layer.py",
        _FALLBACKS,
        [
            (
                "lora_dropout_is_fast_in_training[keep-32]",
                "all projections masked alike",
                "Dropout(projection.dropout.p, seed, stream)",
                "Dropout(projection.dropout.p, seed, 1)",
            ),
            (
                "looking_at_a_model_with_lora_dropout_draws_no_random_numbers",
                "a seed drawn by whoever looks",
                "            projections.append(projection)\n        return projections\n",
                "            projections.append(projection)\n        torch.rand(1)\n        return projections\n",
            ),
        ],
    ),
)

_BENCH_CHECKS = (
    *_faults(
        "bench/operations/dropout.py",
        "tests/bench/operations/test_dropout.py::test_",
        [
            (
                "ours_has_the_twins_mask_in_every_piece_of_the_rows[torch.float32]",
                "every piece of the reference is masked as the first",
                "first_row=int(row[0])",
                "first_row=0",
            ),
            (
                "a_wrong_peer_is_named[too few kept]",
                "nobody looks at how much a peer keeps",
                '("share kept", _beyond_chance(kept))',
                '("share kept", 0.0)',
            ),
            (
                "a_wrong_peer_is_named[backward of another mask]",
                "only a peer's output is looked at",
                "expected.worst_error(results)",
                'expected.worst_error({"output 0": results["output 0"]})',
            ),
            (
                "chance_is_not_held_against_a_peer",
                "chance counts as an error",
                "distance - DEVIATIONS * math.sqrt",
                "distance - 0 * math.sqrt",
            ),
        ],
    ),
    *_faults(
        "bench/operations/sparse_product.py",
        "tests/bench/operations/test_sparse_product.py::test_",
        [
            (
                "each_is_right_by_its_own_measure_and_wrong_by_the_others[torch-torch.bfloat16]",
                "what is left out is too little to be seen",
                ".mul_(2).sub_(1).mul_(THRESHOLD))",
                ".mul_(2).sub_(1).mul_(THRESHOLD / 16))",
            ),
            (
                "wrong_columns_are_seen[columns of the first block]",
                "every block keeps the same columns",
                "columns = torch.randperm(vocabulary, generator=generator, device=device)[: _kept(vocabulary)]",
                "columns = torch.arange(_kept(vocabulary), device=device)",
            ),
            (
                "the_cost_is_that_of_what_is_kept[1100]",
                "the head's rows counted for one block alone",
                "(1 - (1 - kept / shape.vocabulary) ** blocks)",
                "(kept / shape.vocabulary)",
            ),
        ],
    ),
    *_faults(
        "bench/operations/base.py",
        "",
        [
            (
                f"tests/bench/{test}",
                "what a call uses up is not looked after",
                "return self.trained() | {name: self.arguments[name] for name in self.overwritten}",
                "return self.trained()",
            )
            for test in (
                "test_prepared.py::test_what_a_call_uses_up_is_there_again_in_each_round",
                "test_checking.py::test_what_a_call_may_use_up_is_left_alone_too",
            )
        ],
    ),
    *_faults(
        "bench/checking.py",
        "tests/bench/test_checking.py::test_a_providers_own_check_is_asked_in_place_of_the_reference",
        [
            ("", "no check but the usual one", "operation.checks.get(provider, worst_error)(", "worst_error("),
            (
                "tests/bench/test_checking.py::test_the_reference_is_that_of_the_inputs_as_drawn",
                "the reference is computed from what the function has left of its inputs",
                "return expected.worst_error(results_of(function, inputs))",
                "out = results_of(function, inputs)\n    return Expected(operation, inputs, flops).worst_error(out)",
            ),
        ],
    ),
)

FAULTS: tuple[Fault, ...] = (
    *_KERNELS,
    *_AUTOGRAD,
    *_MEMORY,
    *_PATCHING,
    *_DATA,
    *_SKIPPED_COLUMNS,
    *_PACKING,
    *_SAVING,
    *_TRAINING,
    *_GENERATION,
    *_GGUF_TYPES,
    *_OPERATORS,
    *_COMPRESSED,
    *_EXPORT,
    *_AUTOCAST_AND_WARMING,
    *_DOCUMENTS_AND_HELPERS,
    *_DROPOUT,
    *_BENCH_CHECKS,
)
