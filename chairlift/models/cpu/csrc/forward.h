// A piece of a decoder's forward pass in one parallel region: see models/decoder.py for the same in torch, operator by
// operator. All sublayers and both ends are a piece, too.
//
// The code of a kind of block (blocks/) is constructed once per piece, with memory for the largest of its blocks, and
// has STAGES; `prepare`, if there is anything to do before the threads start; `reads`, which tells in which formats its
// products read the stream; `begin`, its work on a token while the stream's rows are made; and `run`.
#pragma once

#include "blocks/attention.h"
#include "blocks/dense_mlp.h"

template <class T, class W> struct Forward {
    const Piece& piece;
    const Sublayers sublayers;
    const Stream<T, W> stream;
    const Attention<T, W> attention;
    const DenseMlp<T, W> dense_mlp;
    const int64_t num_counters;
    Counter* const counters;

    Forward(const Model& model, const Batch& batch, const Piece& p, Arena& arena, int num_threads)
        : piece(p), sublayers(model, p), stream(model, batch, p.residual, has_post_norms(), has_plain(), arena),
          attention(stream, sublayers, num_threads, arena), dense_mlp(stream, sublayers, arena),
          num_counters(num_stages() * num_threads), counters(arena.allocate<Counter>(num_counters)) {}

    // Called before the threads start.
    void prepare() const {
        std::memset((void*)counters, 0, sizeof(Counter) * num_counters);
        stream.prepare();
        attention.prepare();
    }

    void run(Team team) const {
        if (piece.is_first) {
            team.share_rows(stream.num_tokens, [&](int64_t t) { stream.embed(t); });
            team.wait();
        }
        const float* after = nullptr;  // the norm of what the last sublayer adds, which goes with the next stage
        for (const Sublayer& each : sublayers) {
            run_sublayer(team, each, after);
            after = each.post_norm;
        }
        if (!after && !piece.hidden) return;
        team.share_rows(stream.num_tokens, [&](int64_t t) {
            if (after) stream.add_normalized(t, after);
            if (piece.hidden) stream.finish(t, static_cast<T*>(piece.hidden) + t * stream.model.hidden);
        });
    }

  private:
    int64_t num_stages() const {
        int64_t sum = 2;  // the embedding and the end
        for (const Sublayer& each : sublayers)
            sum += 1 + (each.attention ? attention.STAGES : 0) + (each.dense_mlp ? dense_mlp.STAGES : 0);
        return sum;
    }

    bool has_post_norms() const {
        return sublayers.any([](const Sublayer& each) { return each.post_norm != nullptr; });
    }

    bool has_plain() const {
        return sublayers.any([](const Sublayer& each) { return reads(each, true); });
    }

    // Whether products of it read rows that are not quantized although others are, or those others.
    static bool reads(const Sublayer& sublayer, bool plain) {
        return (sublayer.attention && Attention<T, W>::reads(*sublayer.attention, plain)) ||
               (sublayer.dense_mlp && DenseMlp<T, W>::reads(*sublayer.dense_mlp, plain));
    }

    void run_sublayer(Team& team, const Sublayer& sublayer, const float* after) const {
        const bool is_rounded_read = reads(sublayer, false), is_plain_read = reads(sublayer, true);
        team.share_rows(stream.num_tokens, [&](int64_t t) {
            if (after) stream.add_normalized(t, after);
            stream.enter(t, sublayer.pre_norm, is_rounded_read, is_plain_read);
            if (sublayer.attention) attention.begin(*sublayer.attention, t);
            if (sublayer.dense_mlp) dense_mlp.begin(*sublayer.dense_mlp, t);
        });
        team.wait();
        Target target = stream.first_target(sublayer.post_norm != nullptr);
        const auto run = [&](const auto& code, const auto* block) {
            if (!block) return;
            code.run(team, *block, target);
            target.is_sum = true;  // of the blocks that follow side by side
        };
        run(attention, sublayer.attention);
        run(dense_mlp, sublayer.dense_mlp);
    }
};
