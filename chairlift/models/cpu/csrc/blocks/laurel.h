// The block of a residual of low rank: right(left(x)).
#pragma once

#include "../stream.h"

template <class T, class W> struct Laurel {
    static constexpr int64_t STAGES = 3;  // at most, as the counters of a Team are counted

    const Stream<T, W>& stream;
    const InnerRows<T, W> narrow;

    // With memory for each such block of a piece.
    Laurel(const Stream<T, W>& s, const Sublayers& sublayers, Arena& arena)
        : stream(s), narrow(arena, s.num_tokens, sublayers.most(&Sublayer::laurel, width_of)) {}

    static bool reads(const LaurelBlock& block, bool plain) { return is_plain<W>(block.left) == plain; }

    // Called in the stage before `run`.
    void begin(const LaurelBlock& block, int64_t t) const { rows_of(block).clear_padding(t, width_of(block)); }

    void run(Team& team, const LaurelBlock& block, const Target& target) const {
        const InnerRows<T, W> rows = rows_of(block);
        stream.multiply(team, block.left, UNIT_PANELS,
                        [&](int64_t column, int64_t row, int count, const float* c, int tile_stride, int width) {
                            for (int r = 0; r < count; r++) {
                                T* to = rows.written.values + (row + r) * rows.written.stride + column;
                                for (int k = 0; k < width; k += LANES) store16(to + k, load16(c + r * tile_stride + k));
                            }
                        });
        team.wait();
        stream.leave(team, block.right, rows, width_of(block), target);
    }

  private:
    static int64_t width_of(const LaurelBlock& block) { return pad(block.rank, LANES); }

    InnerRows<T, W> rows_of(const LaurelBlock& block) const { return narrow.narrowed(block.rank); }
};
