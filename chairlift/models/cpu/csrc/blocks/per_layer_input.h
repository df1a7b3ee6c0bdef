// The block that mixes into the stream what its layer gets of each token beside it.
#pragma once

#include "../stream.h"

template <class T, class W> struct PerLayerInput {
    static constexpr int64_t STAGES = 3;  // at most, as the counters of a Team are counted

    const Stream<T, W>& stream;
    const InnerRows<T, W> gated;
    const float* const inputs;  // [T][stride]
    const int64_t stride;

    // With memory for each such block of a piece.
    PerLayerInput(const Stream<T, W>& s, const Sublayers& sublayers, const float* layer_inputs, Arena& arena)
        : stream(s), gated(arena, s.num_tokens, sublayers.most(&Sublayer::per_layer_input, size_of)),
          inputs(layer_inputs), stride(s.model.layer_inputs.projection.columns) {}

    static bool reads(const PerLayerInputBlock& block, bool plain) { return is_plain<W>(block.gate) == plain; }

    // Called in the stage before `run`.
    void begin(const PerLayerInputBlock& block, int64_t t) const { rows_of(block).clear_padding(t, block.size); }

    void run(Team& team, const PerLayerInputBlock& block, const Target& target) const {
        const InnerRows<T, W> rows = rows_of(block);
        stream.multiply(
            team, block.gate, UNIT_PANELS,
            [&](int64_t column, int64_t row, int count, const float* c, int tile_stride, int width) {
                for (int r = 0; r < count; r++) {
                    const float* input = inputs + (row + r) * stride + block.first + column;
                    T* to = rows.written.values + (row + r) * rows.written.stride + column;
                    for (int k = 0; k < width; k += LANES)
                        store16(to + k, gelu16(load16(c + r * tile_stride + k)) * load16(input + k));
                }
            });
        team.wait();
        stream.leave(team, block.projection, rows, block.size, target);
    }

  private:
    static int64_t size_of(const PerLayerInputBlock& block) { return block.size; }

    InnerRows<T, W> rows_of(const PerLayerInputBlock& block) const { return gated.narrowed(block.size); }
};

// Completes the inputs of all layers, from the embeddings of the tokens. STAGES as above.
template <class T, class W> struct LayerInputsOfTokens {
    static constexpr int64_t STAGES = 2;

    const Stream<T, W>& stream;
    const LayerInputs& parts;
    float* const inputs;  // [T][columns of the projection]

    static bool reads(const LayerInputs& parts, bool plain) {
        return parts.projection.columns && is_plain<W>(parts.projection) == plain;
    }

    void run(Team& team) const {
        if (!parts.projection.columns) return;
        team.share_rows(stream.num_tokens, [&](int64_t t) {
            stream.enter(t, nullptr, reads(parts, false), reads(parts, true));
        });
        team.wait();
        const int64_t columns = parts.projection.columns;
        stream.multiply(team, parts.projection, int(parts.size / LANES),
                        [&](int64_t column, int64_t row, int count, float* c, int tile_stride, int) {
                            for (int r = 0; r < count; r++)
                                complete(c + r * tile_stride, inputs + (row + r) * columns + column);
                        });
        team.wait();
    }

  private:
    void complete(float* c, float* input) const {
        for (int64_t k = 0; k < parts.size; k += LANES) store16(c + k, load16(c + k) * float(parts.scale));
        const float scale = inverse_rms(c, parts.size, float(stream.model.eps));
        for (int64_t k = 0; k < parts.size; k += LANES) {
            const f32x16 projected = load16(c + k) * scale * load16(parts.norm + k);
            store16(input + k, (projected + load16(input + k)) * float(parts.factor));
        }
    }
};
