// The structures that Python passes: cpu/structures.py has the same fields in the same order, and compares the sizes.
#pragma once

#include <cstdint>

extern "C" {

// The weights of a linear layer, in panels: product/panel.h and grouped/panel.h draw them. The fields after the depth
// are those of weights in groups.
struct Matrix {
    const void* panels;
    const float* bias;  // [columns], or null
    int64_t columns;
    int64_t depth;  // with padding
    const void *scales, *offsets;
    const float* units;
    int64_t num_bits, group_size, scale_bits;  // more than 8 bits: the model's number format
    // The rounding errors of the columns from `first_residual` on, in groups as well; null: they are not kept.
    const void *residual_panels, *residual_scales, *residual_offsets;
    const float* residual_units;
    int64_t first_residual;  // the first of them, where a unit of panels begins

    Matrix residual() const {
        Matrix own = *this;
        own.panels = residual_panels, own.scales = residual_scales;
        own.offsets = residual_offsets, own.units = residual_units;
        return own;
    }
};

struct Layer {
    Matrix qkv, out, gate_up, down;  // gate_up: panels of gate and up alternate
    // Norms [hidden, padded to 16 with zeros] of the inputs of attention and MLP, and of their outputs before these are
    // added to the residual stream; null where there is none.
    const float *pre_attention_norm, *post_attention_norm, *pre_mlp_norm, *post_mlp_norm;
    const float *query_norm, *key_norm;  // [head_dim], or of all heads; null if there is none
    const float* rope;  // [positions][head_dim]: cosines of half a head, then sines; null: no rotation
    int64_t window;     // keys that a query sees at most, its own included
};

struct Model {
    int64_t num_layers, hidden, num_heads, num_kv_heads, head_dim, intermediate, vocab;
    int64_t is_gelu;                  // the MLP's activation: GELU (by tanh), or else SiLU
    int64_t are_heads_normed_as_one;  // query_norm and key_norm span all heads, or else each head
    double eps, attention_scale, embedding_scale, residual_scale, logits_scale;
    double attention_softcap, logits_softcap;  // c: x becomes c tanh(x / c); 0: no cap
    const Layer* layers;
    const float* final_norm;
    const void* embedding;  // [vocab, hidden], or null: the head's columns are the embedding
    Matrix head;
};

struct Batch {
    int64_t num_rows, num_tokens;
    const int64_t* input_ids;
    const int32_t* row_offsets;    // [num_rows + 1]
    const int32_t* slots;          // [num_rows]
    const int32_t* cache_lengths;  // [num_rows]: tokens in the slot before this pass
    const int32_t* common_slots;   // [num_rows]: a slot with the same first tokens as the row's own; or null
    const int32_t* common_lengths;  // [num_rows]: how many tokens these are; the row's own slot holds them, too
    void* blocks;
    int64_t slot_stride, value_offset, layer_stride, token_stride;  // in elements
};
}
