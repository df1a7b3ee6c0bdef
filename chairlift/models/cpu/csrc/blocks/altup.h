// Alternating updates (Baykal et al. 2023): between layers a token is several streams of features. A layer computes the
// first of them, which is the residual stream; it predicts all before, and corrects all afterwards. See blocks/altup.py.
#pragma once

#include "../stream.h"

template <class T, class W> struct AltUp {
    const Stream<T, W>& stream;
    const Streams& streams;
    const int64_t count;

    explicit AltUp(const Stream<T, W>& s) : stream(s), streams(s.model.streams), count(s.model.streams.count) {}

    // Of both ends of a pass, at most, as the counters of a Team are counted.
    int64_t num_stages() const { return count ? 3 * count + 2 : 0; }

    static bool reads(const Streams& streams, bool plain) {
        for (int64_t i = 0; i < streams.num_products; i++)
            if (is_plain<W>(streams.products[i]) == plain) return true;
        return false;
    }

    // Makes the further streams of embedded tokens, each with the magnitude of the first.
    void spread(Team& team) const {
        if (!count) return;
        team.share_rows(stream.num_tokens, [&](int64_t t) { enter(stream.x, t); });
        team.wait();
        for (int64_t i = 0; i + 1 < count; i++) multiply(team, streams.spreading(i), stream.further(i));
        team.wait();
        team.share_rows(stream.num_tokens, [&](int64_t t) {
            for (int64_t i = 0; i + 1 < count; i++) {
                float* own = row(stream.further(i), t);
                scale(own, ratio(row(stream.x, t), own));
            }
        });
        team.wait();
    }

    // Makes the first stream the mean of all, each of the others multiplied, with the magnitude of the first.
    void merge(Team& team) const {
        for (int64_t i = 0; i + 1 < count; i++) {
            float* own = stream.further(i);
            team.share_rows(stream.num_tokens, [&](int64_t t) { enter(own, t); });
            team.wait();
            multiply(team, streams.merging(i), own);
            team.wait();
        }
        team.share_rows(stream.num_tokens, [&](int64_t t) {
            float factors[MOST_STREAMS], *to = row(stream.x, t);
            for (int64_t i = 0; i + 1 < count; i++) factors[i] = ratio(to, row(stream.further(i), t));
            for (int64_t k = 0; k < stream.stride; k += LANES) {
                f32x16 sum = load16(to + k);
                for (int64_t i = 0; i + 1 < count; i++) sum += load16(row(stream.further(i), t) + k) * factors[i];
                store16(to + k, sum * (1.0f / float(count)));
            }
        });
        team.wait();
    }

    // Adds to each stream a mixture of all, and keeps the first.
    void predict(const AltUpBlock& block, int64_t t) const {
        float modalities[MOST_STREAMS] = {}, mixture[MOST_STREAMS * MOST_STREAMS];
        find_modalities(block, t, modalities);
        for (int64_t i = 0; i < count * count; i++) mixture[i] = weigh(block.prediction + i * count, modalities);
        float* first = row(stream.predicted, t);
        for (int64_t k = 0; k < stream.stride; k += LANES) {
            f32x16 before[MOST_STREAMS];
            for (int64_t i = 0; i < count; i++) before[i] = load16(row(at(i), t) + k);
            for (int64_t j = 0; j < count; j++) {
                f32x16 sum = before[j];
                for (int64_t i = 0; i < count; i++) sum += before[i] * mixture[j * count + i];
                store16(row(at(j), t) + k, sum);
                if (!j) store16(first + k, sum);
            }
        }
    }

    // Adds to each predicted stream a share of what the layer computed beyond the prediction of the first.
    void correct(const AltUpBlock& block, int64_t t) const {
        float modalities[MOST_STREAMS] = {}, shares[MOST_STREAMS];
        find_modalities(block, t, modalities);
        for (int64_t i = 0; i < count; i++) shares[i] = weigh(block.correction + i * count, modalities) + 1;
        const float* first = row(stream.predicted, t);
        for (int64_t k = 0; k < stream.stride; k += LANES) {
            const f32x16 predicted = load16(first + k), news = load16(row(stream.x, t) + k) - predicted;
            store16(row(stream.x, t) + k, predicted + news * shares[0]);
            for (int64_t i = 1; i < count; i++) {
                float* to = row(at(i), t) + k;
                store16(to, load16(to) + news * shares[i]);
            }
        }
    }

  private:
    static constexpr float LEAST_SQUARE = 1e-5f;  // of a stream's elements on average, when it is scaled

    float* at(int64_t i) const { return i ? stream.further(i - 1) : stream.x; }

    float* row(float* rows, int64_t t) const { return rows + t * stream.stride; }

    void enter(float* rows, int64_t t) const {
        stream.enter_row(row(rows, t), t, reads(streams, false), reads(streams, true));
    }

    void multiply(Team& team, const Matrix& matrix, float* to) const {
        stream.multiply(team, matrix, UNIT_PANELS,
                        [&](int64_t column, int64_t first, int number, const float* c, int tile_stride, int width) {
                            for (int r = 0; r < number; r++)
                                for (int k = 0; k < width; k += LANES)
                                    store16(row(to, first + r) + column + k, load16(c + r * tile_stride + k));
                        });
    }

    // tanh(router(norm(first stream) / hidden))
    void find_modalities(const AltUpBlock& block, int64_t t, float* modalities) const {
        const float* x = row(stream.x, t);
        const float scale = inverse_rms(x, stream.model.hidden, float(stream.model.eps)) / float(stream.model.hidden);
        for (int64_t i = 0; i < count; i++) {
            f32x16 sum{};
            for (int64_t k = 0; k < stream.stride; k += LANES)
                sum += load16(x + k) * load16(block.router_norm + k) * load16(block.router + i * stream.stride + k);
            modalities[i] = sum16(sum) * scale;
        }
        for (int64_t i = 0; i < count; i += LANES) store16(modalities + i, cap16(load16(modalities + i), 1.0f));
    }

    float weigh(const float* weights, const float* modalities) const {
        float sum = 0;
        for (int64_t i = 0; i < count; i++) sum += weights[i] * modalities[i];
        return sum;
    }

    // The factor that gives the second row the magnitude of the first.
    float ratio(const float* wanted, const float* own) const {
        const float square = mean_square(own);
        return __builtin_sqrtf(mean_square(wanted) / (square > LEAST_SQUARE ? square : LEAST_SQUARE));
    }

    float mean_square(const float* x) const {
        f32x16 squares{};
        for (int64_t k = 0; k < stream.stride; k += LANES) squares += load16(x + k) * load16(x + k);
        return sum16(squares) / float(stream.model.hidden);
    }

    void scale(float* x, float factor) const {
        for (int64_t k = 0; k < stream.stride; k += LANES) store16(x + k, load16(x + k) * factor);
    }
};
