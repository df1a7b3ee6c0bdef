// What Python hands over: see llama.py, whose structures have the same fields in the same order.
#pragma once

#include "product.h"

extern "C" {

struct Layer {
    Matrix qkv, out, gate_up, down;  // gate_up: panels of gate and up take turns
    const float* input_norm;         // both [hidden, padded to 16 with zeros]
    const float* post_norm;
};

struct Model {
    int64_t num_layers, hidden, num_heads, num_kv_heads, head_dim, intermediate, vocab;
    double eps;
    const Layer* layers;
    const float* final_norm;
    const void* embedding;  // [vocab, hidden], or null: the head's columns are the embedding
    const float* rope;      // [positions][head_dim]: cosines of half a head, then sines
    Matrix head;
};

struct Batch {
    int64_t num_rows, num_tokens;
    const int64_t* input_ids;
    const int32_t* row_offsets;    // [num_rows + 1]
    const int32_t* slots;          // [num_rows]
    const int32_t* cache_lengths;  // [num_rows]: tokens in the slot before this pass
    const int32_t* common_slots;   // [num_rows]: a slot that begins like the row's own; or null
    const int32_t* common_lengths;  // [num_rows]: with so many tokens, all of which are in the row's own slot, too
    void* blocks;
    int64_t slot_stride, value_offset, layer_stride, token_stride;  // in elements
};
}
