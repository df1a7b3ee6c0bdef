// The block of a gated short convolution: one product gives three parts of each token, of which the first gates what is
// convolved, the third, and the second what comes of it.
#pragma once

#include "../recurrence.h"

template <class T, class W> struct GatedShortConv {
    static constexpr int64_t STAGES = 4;  // at most, as the counters of a Team are counted

    const Stream<T, W>& stream;
    const StateRows& rows;
    const InnerRows<T, W> gated;
    float* const projected;  // [T][3 features]

    // With memory for each such block of a piece.
    GatedShortConv(const Stream<T, W>& s, const StateRows& r, const Sublayers& sublayers, Arena& arena)
        : stream(s), rows(r), gated(arena, s.num_tokens, sublayers.most(&Sublayer::gated_short_conv, num_features)),
          projected(arena.allocate<float>(s.num_tokens * sublayers.most(&Sublayer::gated_short_conv, num_projected))) {}

    static bool reads(const GatedShortConvBlock& block, bool plain) { return is_plain<W>(block.in) == plain; }

    // Called in the stage before `run`.
    void begin(const GatedShortConvBlock& block, int64_t t) const { rows_of(block).clear_padding(t, block.num_features); }

    void run(Team& team, const GatedShortConvBlock& block, const Target& target) const {
        const InnerRows<T, W> inner = rows_of(block);
        const int64_t width = block.num_features, columns = 3 * width;
        stream.keep_product(team, block.in, projected, columns);
        team.wait();
        const Taps taps{block.taps, nullptr, block.num_taps, width};
        const int64_t units = width / LANES;
        team.share(stream.batch.num_rows * units, [&](int64_t task) {
            const RowState row = rows.at(task / units, block.place);
            const int64_t feature = task % units * LANES;
            float* own = projected + row.token * columns;
            for (int64_t t = 0; t < row.num_new; t++) {
                float* gate = own + t * columns + feature;
                store16(gate, load16(gate) * load16(gate + 2 * width));
            }
            convolve16(taps, row, own, columns, feature, [&](int64_t i, f32x16 x) {
                const int64_t t = i - row.num_replayed;
                if (t < 0) return;
                const f32x16 gate = load16(own + t * columns + width + feature);
                store16(inner.written.values + (row.token + t) * inner.written.stride + feature, gate * x);
            });
        });
        team.wait();
        stream.leave(team, block.out, inner, width, target);
    }

  private:
    static int64_t num_features(const GatedShortConvBlock& block) { return block.num_features; }
    static int64_t num_projected(const GatedShortConvBlock& block) { return block.in.columns; }

    InnerRows<T, W> rows_of(const GatedShortConvBlock& block) const { return gated.narrowed(block.num_features); }
};
