// What recurrent blocks share: how a row's state goes through its tokens.
//
//     inputs of a row    r r n n n t t      r: replayed, left in the cache by an earlier pass; n, t: of its new tokens
//     taken into the slot's state: r r n n n. Those of the tentative ones, t, are left in the cache instead.
//
// A recurrence goes token by token in float32 in every pass, so that its results do not depend on how a sequence is
// divided into passes. Blocks do it in two steps: the first convolves the inputs of all tokens, `Convolved`; the second
// moves the matrices of heads.
#pragma once

#include "stream.h"

// One row of a batch in one layer.
struct RowState {
    float* live;     // the layer's state in the row's slot
    float* pending;  // the layer's inputs of the slot's tentative tokens, one after the other
    int64_t pending_stride;
    int64_t token;  // of the batch, the first of the row
    int64_t first;  // of the row's inputs, among those of all rows
    int64_t num_replayed, num_new, num_tentative;
    bool is_fresh;  // begins from zeros

    int64_t num_inputs() const { return num_replayed + num_new; }
    int64_t num_stored() const { return num_inputs() - num_tentative; }
};

// The rows of a batch, for layers with states.
struct StateRows {
    const Batch& batch;
    int64_t* firsts;  // [num_rows]: of each row's inputs, among those of all rows

    StateRows(const Batch& b, bool has_states, Arena& arena)
        : batch(b), firsts(arena.allocate<int64_t>(has_states ? b.num_rows : 0)) {}

    // Called before the threads start, if there are states.
    void prepare() const {
        int64_t first = 0;
        for (int64_t row = 0; row < batch.num_rows; row++) {
            firsts[row] = first;
            first += batch.states.num_replayed[row] + batch.row_offsets[row + 1] - batch.row_offsets[row];
        }
    }

    // The inputs of all rows. A batch that is only measured has no states, and replays nothing.
    int64_t num_inputs() const {
        int64_t sum = batch.num_tokens;
        if (batch.states.num_replayed)
            for (int64_t row = 0; row < batch.num_rows; row++) sum += batch.states.num_replayed[row];
        return sum;
    }

    RowState at(int64_t row, StatePlace place) const {
        const States& states = batch.states;
        const int64_t slot = batch.slots[row], start = batch.cache_lengths[row], token = batch.row_offsets[row];
        return {states.live + slot * states.live_stride + place.state_offset,
                states.pending + slot * states.pending_slot_stride + place.input_offset,
                states.pending_token_stride,
                token,
                firsts[row],
                states.num_replayed[row],
                batch.row_offsets[row + 1] - token,
                states.num_tentative[row],
                start == states.num_replayed[row]};
    }
};

constexpr int MOST_TAPS = 4;

// A causal convolution of each feature. `taps` [num_taps][features]: the oldest token's first.
struct Taps {
    const float *weights, *bias;  // bias: [features], or null
    int64_t num_taps, num_features;
};

constexpr int64_t TOKENS_AHEAD = 16;  // whose inputs are prefetched, as each lies in a page of its own
constexpr int64_t FEATURES_AHEAD = 128;  // whose window and taps are prefetched: in decode they come from memory

// Convolves features [feature, feature + 16) of a row's inputs with the window that its state begins with, which then
// is that after the stored inputs. `inputs`: of the row's new tokens. `use(i, x)` gets the result of input i.
template <int TAPS, class Use>
void convolve16(const Taps& taps, const RowState& row, const float* inputs, int64_t stride, int64_t feature, Use use) {
    const int64_t kept = TAPS - 1;
    f32x16 window[TAPS], weights[TAPS];
    float* live = row.live + feature;
    for (int k = 0; k < kept; k++) {
        window[k] = row.is_fresh ? splat(0.0f) : load16(live + k * taps.num_features);
        weights[k] = load16(taps.weights + k * taps.num_features + feature);
        __builtin_prefetch(live + k * taps.num_features + FEATURES_AHEAD);
        __builtin_prefetch(taps.weights + k * taps.num_features + feature + FEATURES_AHEAD);
    }
    weights[kept] = load16(taps.weights + kept * taps.num_features + feature);
    __builtin_prefetch(taps.weights + kept * taps.num_features + feature + FEATURES_AHEAD);
    const f32x16 bias = taps.bias ? load16(taps.bias + feature) : splat(0.0f);
    for (int64_t i = 0; i < row.num_inputs(); i++) {
        const int64_t t = i - row.num_replayed;
        const float* from = (t < 0 ? row.pending + i * row.pending_stride : inputs + t * stride) + feature;
        if (i + TOKENS_AHEAD < row.num_inputs()) __builtin_prefetch(inputs + (t + TOKENS_AHEAD) * stride + feature);
        window[kept] = load16(from);
        f32x16 sum = bias;
        for (int k = 0; k < TAPS; k++) sum = fma16(window[k], weights[k], sum);
        for (int k = 0; k < kept; k++) window[k] = window[k + 1];
        use(i, sum);
        if (i + 1 == row.num_stored())
            for (int k = 0; k < kept; k++) store16(live + k * taps.num_features, window[k]);
    }
    // After the last replayed input was read: what is left for the next pass.
    for (int64_t i = 0; i < row.num_tentative; i++)
        store16(row.pending + i * row.pending_stride + feature,
                load16(inputs + (row.num_new - row.num_tentative + i) * stride + feature));
}

template <class Use>
void convolve16(const Taps& taps, const RowState& row, const float* inputs, int64_t stride, int64_t feature, Use use) {
    switch (taps.num_taps) {
        case 2: return convolve16<2>(taps, row, inputs, stride, feature, use);
        case 3: return convolve16<3>(taps, row, inputs, stride, feature, use);
        default: return convolve16<4>(taps, row, inputs, stride, feature, use);
    }
}

// Calls `use` for all columns of a matrix, VECTORS vectors at a time and the last ones half as many at a time, with the
// number of vectors as a constant, and the first column.
template <int VECTORS, class Use> void for_columns(int64_t width, Use use, int64_t column = 0) {
    for (; column + VECTORS * LANES <= width; column += VECTORS * LANES)
        use(std::integral_constant<int, VECTORS>{}, column);
    if constexpr (VECTORS > 1) for_columns<VECTORS / 2>(width, use, column);
}

// Some columns of a head's matrix while they go through a row's inputs: where they are, or apart from the others.
template <int VECTORS> struct Columns {
    float* const matrix;  // [height][width], from the first of these columns on
    const int64_t height, width;
    float* const first;  // [height], `stride` apart: the columns themselves
    const int64_t stride;

    // `own`: memory for them if they are apart, as tentative inputs must have them; null: they are not.
    Columns(const RowState& row, float* of, int64_t of_height, int64_t of_width, float* own)
        : matrix(of), height(of_height), width(of_width), first(own ? own : of),
          stride(own ? VECTORS * LANES : of_width) {
        if (row.is_fresh)
            for (int64_t d = 0; d < height; d++) std::memset((void*)(matrix + d * width), 0, ROW_BYTES);
        if (first != matrix)
            for (int64_t d = 0; d < height; d++) std::memcpy(at(d, 0), matrix + d * width, ROW_BYTES);
    }

    float* at(int64_t d, int vector) const { return first + d * stride + vector * LANES; }

    // Prefetches a part of what stands in another matrix where row `d` of the columns stands in theirs.
    template <int FIRST, int LAST> INLINE void fetch(const float* other, int64_t d) const {
        for (int v = FIRST; v < LAST; v++) __builtin_prefetch(other + d * width + v * LANES, 0, 2);
    }

    // Calls `move(i)` for each input, and keeps what the stored ones have made.
    template <class Move> void walk(const RowState& row, Move move) const {
        for (int64_t i = 0; i < row.num_inputs(); i++) {
            move(i);
            if (i + 1 == row.num_stored() && first != matrix)
                for (int64_t d = 0; d < height; d++) std::memcpy(matrix + d * width, at(d, 0), ROW_BYTES);
        }
    }

  private:
    static constexpr size_t ROW_BYTES = VECTORS * LANES * sizeof(float);
};
