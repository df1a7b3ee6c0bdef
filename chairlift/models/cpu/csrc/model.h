// The structures that Python passes: cpu/structures.py has the same fields in the same order, and compares the sizes.
#pragma once

#include <cstdint>

extern "C" {

// The weights of a linear layer, in panels: product/panel.h and grouped/panel.h draw them. The fields after the depth
// are those of weights in groups.
struct Matrix {
    const void* panels;
    const float* bias;  // [columns], or null
    int64_t columns;  // of all formats
    int64_t depth;    // with padding
    const void *scales, *offsets;
    const float* units;
    int64_t num_bits, group_size, scale_bits;  // more than 8 bits: the model's number format
    int64_t scales_per_step;
    const void* steps;      // of scales and offsets, float16; null: these are in units
    const uint8_t* table;  // [16]: bytes that values of 4 bits stand for; null: for themselves
    // The rounding errors of the columns from `first_residual` on, in groups as well; null: they are not kept.
    const void *residual_panels, *residual_scales, *residual_offsets;
    const float* residual_units;
    int64_t first_residual;  // the first of them, where a unit of panels begins
    const Matrix* next;      // columns in another format that come after its own; null: there are none
    int64_t first_next;      // the panel with which these begin

    Matrix residual() const {
        Matrix own = *this;
        own.panels = residual_panels, own.scales = residual_scales;
        own.offsets = residual_offsets, own.units = residual_units;
        return own;
    }
};

// Attention: weights, and the shape that they have.
struct AttentionBlock {
    Matrix qkv, out;  // qkv: heads of queries, of keys, of gates, of values, as far as it has them
    const float *query_norm, *key_norm;  // [head_dim], or of all heads; null if there is none
    const float* sinks;  // [num_heads]: scores that take a part of the softmax; null if there are none
    const float* rope;  // [positions][head_dim]: cosines of half a head, then sines; null: no rotation
    int64_t num_heads, num_kv_heads, head_dim;
    int64_t window;                   // keys that a query sees at most, its own included
    int64_t are_heads_normed_as_one;  // query_norm and key_norm span all heads, or else each head
    int64_t has_output_gate;          // what a head attends to is multiplied by the sigmoid of a gate
    int64_t has_value_norm;           // of each head, without factors
    int64_t are_keys_values;          // values are what keys are before their norm and rotation; qkv has none
    // Elements that keys and values have in common, 0: none. Then the heads of queries and keys begin with what rotates,
    // of each half, and a head of a token in the cache is: rotated elements of the key, common ones, the value's others.
    int64_t num_common;
    int64_t is_query_only;            // keys and values are those of an earlier block, which has written them
    int64_t group, plane;             // where its keys and values are in the cache
    double scale, softcap;            // of scores; c: x becomes c tanh(x / c); 0: no cap
    double input_scale, output_scale;  // factors of its input, by which the bias of qkv is divided, and its output
    // Latent attention, if there are columns of kv_down, which makes what a slot keeps of a token: a latent vector and a
    // key that turns. Its one key/value head has the latent vector in common, and nothing else of a value. qkv makes
    // queries alone, [still_dim + turning] of each head, of query_down's columns if it has any; key_up is each head's
    // matrix [latent][still_dim] of the part that does not turn, value_up [value_dim][latent] of what it attends to.
    Matrix query_down, kv_down, key_up, value_up;
    const float *query_down_norm, *kv_norm;
    int64_t still_dim, value_dim;
    double latent_eps;

    bool is_latent() const { return kv_down.columns != 0; }
    int64_t turning() const { return head_dim - num_common; }

    // Elements of all heads' outputs.
    int64_t output_width() const { return num_heads * (is_latent() ? value_dim : head_dim); }

    // Elements from head to head of a token in the cache.
    int64_t head_stride() const { return num_common ? 2 * head_dim - num_common : head_dim; }

    // The place in a head of element d of a value as it is kept. Of neighbours in a vector of 32 the places are, too.
    int64_t place_of_value(int64_t d) const {
        if (!num_common || is_latent()) return d;
        const int64_t half = head_dim / 2, still = num_common / 2, turning = half - still;
        if (d < num_common) return d < still ? turning + d : half + turning + d - still;
        return d < num_common + turning ? d - num_common : half + d - num_common - turning;
    }
};

// down(activation(gate(x)) * up(x)), or down(relu(up(x))^2)
struct DenseMlpBlock {
    Matrix up, down;  // up: panels of gate and up alternate, if there is a gate
    int64_t intermediate;
    int64_t is_gated;
    int64_t is_gelu;  // the activation of a gate: GELU (by tanh), or else SiLU
    double gate_scale, output_scale;  // factors of what that activation gets, and of the output
    int64_t is_sparse;  // of the gate's outputs only what exceeds their mean by `cutoff` standard deviations counts
    double cutoff;
    Matrix output_gate;  // of one column: the sigmoid of its product is a factor of the output; no columns: none
};

// The sum over the experts that the router chooses for a token of weight down(activation(gate(x)) * up(x)).
struct ExpertsBlock {
    Matrix router;
    Matrix gate, up, down;     // of all experts: the panels of one come after those of the one before it
    const float* choice_bias;  // [num_experts], of scores when they are compared; null: there is none
    int64_t num_experts, num_chosen, intermediate;
    int64_t is_sigmoid;             // scores are sigmoids, or else a softmax
    int64_t is_normalized;          // weights are divided by their sum plus eps
    int64_t num_groups, num_chosen_groups;  // experts are chosen of the groups whose best, or best two, are the best
    int64_t num_scored_of_group;    // 1 or 2
    int64_t activation;             // of the gate: 0 SiLU, 1 GELU (by tanh), 2 (up + 1) gate sigmoid(alpha gate)
    double eps, scale;              // scale: of weights
    double alpha, limit;            // of activation 2: gate is at most the limit, and up is within it on both sides
    const float* router_norm;       // [hidden]: what the router reads is normed with these factors; null: as experts do
    const float* expert_scales;     // [num_experts], factors of weights in the end; null: all are 1
};

// projection(gelu(gate(x)) * input), with what this layer gets of each token beside the stream.
struct PerLayerInputBlock {
    Matrix gate, projection;
    int64_t size, first;  // of its input among those of all layers
};

// right(left(x)), by way of few features.
struct LaurelBlock {
    Matrix left, right;
    int64_t rank;
};

constexpr int64_t MOST_STREAMS = 64;

// How a layer mixes the streams of a model that has several.
struct AltUpBlock {
    const float *router_norm, *router;  // [hidden] and [streams][hidden], padded to 16 with zeros
    const float* prediction;            // [to][from][modalities]
    const float* correction;            // [to][modalities]
    const float* output_scale;          // [hidden, padded], of what is mixed with a layer's inputs; null: all are 1
};

// Where a layer's state begins in the row of a slot, and its inputs among those of a tentative token.
struct StatePlace {
    int64_t state_offset, input_offset;
};

// A gated short convolution. Its state: the last inputs of the convolution [num_taps - 1][features].
struct GatedShortConvBlock {
    Matrix in, out;     // in: the gate before the convolution, the one after it, and what is convolved
    const float* taps;  // [num_taps][features], the oldest token's first
    int64_t num_features, num_taps;
    StatePlace place;
};

// A Gated DeltaNet. Its state: the last inputs of the convolution [num_taps - 1][mixed], matrices [heads][key][value].
struct GatedDeltaNetBlock {
    Matrix in, gate, out;           // in: queries, keys and values, which are mixed, and output gates; gate: beta, decay
    const float* taps;              // [num_taps][mixed], the oldest token's first
    const float *rates, *dt_bias;   // [value heads]; rates: of decay, below 0
    const float* norm;              // [value_dim], of each head's output
    int64_t num_key_heads, num_value_heads, key_dim, value_dim, num_taps;
    int64_t has_tiled_heads;        // value heads take the key heads in turns, instead of neighbours the same one
    StatePlace place;
    double norm_eps, length_eps;    // length_eps: added to the squared lengths of queries and keys
};

// A Mamba 2. Its state: the last inputs of the convolution [num_taps - 1][mixed], matrices [heads][state][head].
struct Mamba2Block {
    Matrix in, out;               // in: output gates; x, B and C, which are mixed; dt
    const float* factors;         // of what `in` gives, padded to 16; null: all are 1
    const float *taps, *conv_bias;  // [num_taps][mixed], the oldest token's first; [mixed], or null
    const float *rates, *skips, *dt_bias;  // [heads, padded to 16]; rates: of decay, below 0; skips: D
    const float* norm;            // [features], of each group of them; null: no norm
    int64_t num_heads, head_dim, num_groups, state_size, num_taps;
    int64_t is_gated_last;        // the output is normalised before it is gated
    StatePlace place;
    double norm_eps, least_dt, most_dt, output_scale;
};

// scale (x + post_norm(block(pre_norm(x)))), or with the sum of several blocks side by side. The others are null.
//
// If blocks side by side have norms of their own, they are as many sublayers that read the same x, and the last adds all
// to it: scale (x + sum_norm(post_norm(block(pre_norm(x))) + that of the sublayers before it that are continued)).
//
// With several streams the first is x. `predicts` mixes all of them before the sublayer; so does `corrects`, and then
// what the block reads is scaled, and what it makes is added to the further streams instead of x.
struct Sublayer {
    const float *pre_norm, *post_norm, *sum_norm;  // [hidden, padded to 16 with zeros]; null where there is none
    int64_t is_continued;
    int64_t adds_input;  // pre_norm(x) is added to the sum as well
    double scale;
    const AttentionBlock* attention;
    const DenseMlpBlock* dense_mlp;
    const ExpertsBlock* experts;
    const GatedShortConvBlock* gated_short_conv;
    const GatedDeltaNetBlock* gated_delta_net;
    const Mamba2Block* mamba2;
    const PerLayerInputBlock* per_layer_input;
    const LaurelBlock* laurel;
    const AltUpBlock *predicts, *corrects;

    bool has_state() const { return gated_short_conv || gated_delta_net || mamba2; }

    // Whether something is left to do with the stream when the blocks have added to it.
    bool has_end() const { return post_norm || scale != 1; }
};

// What layers get of a token beside the stream, `size` numbers each, which follow one another:
// factor (norm(scale projection(embedding)) + those of a second embedding), which Python has put there.
struct LayerInputs {
    Matrix projection;  // no columns: layers get nothing
    const float* norm;  // [size]
    int64_t size;
    double scale, factor;
};

// The streams of features that a token has between layers: none, or the residual stream and further ones.
struct Streams {
    int64_t count, num_products;
    const Matrix* products;  // that make each further one of the embedding, and then those that merge each

    const Matrix& spreading(int64_t i) const { return products[i]; }
    const Matrix& merging(int64_t i) const { return products[count - 1 + i]; }
};

struct Model {
    int64_t hidden, vocab;
    double eps, embedding_scale, residual_scale, logits_scale;
    double logits_softcap;  // c: x becomes c tanh(x / c); 0: no cap
    int64_t num_sublayers;
    const Sublayer* sublayers;  // of all layers, in order
    const float* final_norm;
    const void* embedding;  // [vocab, hidden]; null: it is the columns of the next, or without columns, of the head
    Matrix embedding_groups, head;
    LayerInputs layer_inputs;
    Streams streams;
};

// The blocks that keep keys and values of equal shape: [slots][keys, values][planes][positions][heads][head_dim]
struct CacheGroup {
    void* blocks;
    int64_t slot_stride, value_offset, plane_stride, token_stride;  // in elements
};

// The recurrent states of slots, and how far each row's has come: see cache/states.py. Null if no layer has one.
struct States {
    float *live, *pending;
    int64_t live_stride, pending_slot_stride, pending_token_stride;  // in elements
    const int32_t *num_replayed, *num_tentative;  // [num_rows]
};

struct Batch {
    int64_t num_rows, num_tokens;
    const int64_t* input_ids;
    const int32_t* row_offsets;    // [num_rows + 1]
    const int32_t* slots;          // [num_rows]
    const int32_t* cache_lengths;  // [num_rows]: tokens in the slot before this pass
    const int32_t* common_slots;   // [num_rows]: a slot with the same first tokens as the row's own; or null
    const int32_t* common_lengths;  // [num_rows]: how many tokens these are; the row's own slot holds them, too
    int64_t num_groups;
    const CacheGroup* groups;
    States states;
};

// Some of a pass: its beginning, some neighbouring sublayers, its end.
struct Piece {
    int64_t is_first;  // begins with the embedding of the tokens
    int64_t first_sublayer, num_sublayers;
    // [streams][tokens][hidden, padded to 16 with zeros], between pieces; null: the piece is a whole pass
    float* residual;
    void* hidden;     // [tokens][hidden] if it ends with the final norm, or else null
    float* layer_inputs;  // [tokens][columns of their projection], which the beginning of a pass completes; or null
};
}

// The sublayers of a piece.
struct Sublayers {
    const Sublayer *first, *last;

    Sublayers(const Model& model, const Piece& piece)
        : first(model.sublayers + piece.first_sublayer), last(first + piece.num_sublayers) {}

    const Sublayer* begin() const { return first; }
    const Sublayer* end() const { return last; }

    // Whether it is the last of several side by side.
    bool continue_to(const Sublayer& sublayer) const { return &sublayer > first && (&sublayer)[-1].is_continued; }

    // The largest number that `count` finds in their blocks of a kind, such as &Sublayer::attention; 0: there are none.
    template <class Block, class Count> int64_t most(const Block* Sublayer::*kind, Count count) const {
        int64_t most = 0;
        for (const Sublayer& each : *this)
            if (each.*kind && count(*(each.*kind)) > most) most = count(*(each.*kind));
        return most;
    }

    template <class Test> bool any(Test test) const {
        for (const Sublayer& each : *this)
            if (test(each)) return true;
        return false;
    }
};
