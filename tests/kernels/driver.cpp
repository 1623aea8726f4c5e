// Runs the kernels, without Python or torch, over random ragged and odd sizes, for a build with sanitizers:
// driver SECONDS SEED. Every array has exactly the size that the kernel was told. Each result is held to
// simple loops in double, and has the same bits on every instruction set of this processor and any number of
// threads. Ends with 1 and a sentence where one does not.
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "attention.h"
#include "dispatch.h"
#include "head_rows.h"
#include "head_scan.h"
#include "linear.h"
#include "partition.h"
#include "rowwise.h"
#include "scan.h"

namespace {

using namespace apcbatch;
using Integers = std::vector<int64_t>;

std::mt19937_64 generator;
int64_t comparisons = 0;

int64_t pick(int64_t low, int64_t high) { return low + int64_t(generator() % uint64_t(high - low + 1)); }
bool coin() { return pick(0, 1) == 1; }

// Values of one type in memory of exactly their size, and what they are worth.
struct Array {
    DType dtype;
    int64_t size;
    std::unique_ptr<char[]> memory;

    Array(DType type, int64_t count, double scale = 1.0)
        : dtype(type), size(count), memory(new char[size_t(count * bytes_of(type))]) {
        std::normal_distribution<float> normal;
        for (int64_t i = 0; i < size; ++i) set(i, float(scale) * normal(generator));
    }
    void* data() const { return memory.get(); }
    float* floats() const { return reinterpret_cast<float*>(memory.get()); }
    int64_t bytes() const { return size * bytes_of(dtype); }
    void set(int64_t i, float value) {
        uint32_t bits;
        std::memcpy(&bits, &value, 4);
        const uint16_t half = uint16_t(bits >> 16);
        if (dtype == DType::float32) std::memcpy(memory.get() + 4 * i, &bits, 4);
        if (dtype == DType::bfloat16) std::memcpy(memory.get() + 2 * i, &half, 2);
    }
    double at(int64_t i) const {
        uint32_t bits = 0;
        if (dtype == DType::float32) std::memcpy(&bits, memory.get() + 4 * i, 4);
        if (dtype == DType::bfloat16)
            std::memcpy(reinterpret_cast<char*>(&bits) + 2, memory.get() + 2 * i, 2);
        float value;
        std::memcpy(&value, &bits, 4);
        return double(value);
    }
};

DType any_dtype() { return coin() ? DType::float32 : DType::bfloat16; }

[[noreturn]] void fail(const std::string& what) {
    std::fprintf(stderr, "%s\n", what.c_str());
    std::exit(1);
}

// Runs the kernel on every instruction set with 1 and 3 threads: `output` must always get the same bytes,
// from the same beginning, and be close to `expected`. `exact_from`: sets before it in `Isa` agree with
// plain.
void check(const std::string& name, Array& output, const std::vector<double>& expected, double tolerance,
           bool widened, const std::function<void(int)>& kernel) {
    const std::string begin(output.memory.get(), size_t(output.bytes()));
    std::string first;
    for (const Isa isa : kIsas) {
        if (!set_isa(isa)) continue;
        std::string of_isa;
        for (const int threads : {1, 3}) {
            std::memcpy(output.data(), begin.data(), begin.size());
            kernel(threads);
            const std::string bytes(output.memory.get(), size_t(output.bytes()));
            if (first.empty()) first = bytes;
            if (of_isa.empty()) of_isa = bytes;
            if (bytes != of_isa) fail(name + " on " + isa_name(isa) + ": other bits with more threads");
            const bool own =
                widened && std::strcmp(isa_product(isa), "widen") != 0;  // which rounds differently
            if (!own && bytes != first) fail(name + ": other bits on " + isa_name(isa));
            for (int64_t i = 0; i < output.size; ++i) {
                const double want = expected[size_t(i)], got = output.at(i);
                const double room = output.dtype == DType::bfloat16 ? 2e-2 : tolerance;
                if (!(std::fabs(got - want) <= room * (1.0 + std::fabs(want)))) {
                    fail(name + " on " + isa_name(isa) + ": " + std::to_string(got) + " for " +
                         std::to_string(want) + " at " + std::to_string(i));
                }
            }
            ++comparisons;
        }
    }
}

std::vector<double> worth(const Array& array) {
    std::vector<double> values;
    for (int64_t i = 0; i < array.size; ++i) values.push_back(array.at(i));
    return values;
}

// To the nearest bfloat16, of two equally near ones to the even one: as inputs of bfloat16 weights are.
double rounded(double value) {
    int exponent;
    const double fraction = std::frexp(value, &exponent);  // bfloat16 has 8 bits of it
    return std::ldexp(std::nearbyint(std::ldexp(fraction, 8)), exponent - 8);
}

double silu(double x) { return x / (1.0 + std::exp(-x)); }

void try_linear() {
    const int64_t t = pick(0, 40), in = pick(1, 530), out = pick(1, 90), gap = pick(0, 3);
    const DType type = any_dtype();
    Array x(any_dtype(), t * (in + gap)), w(type, out * in, 0.1);
    Array scale(DType::float32, out), bias(DType::float32, out);
    Array packed(type, packed_bytes(out, in, type) / bytes_of(type)), y(any_dtype(), t * out);
    pack_linear(w.data(), in, out, in, type, packed.data(), 2);
    const bool scaled = coin(), biased = coin();
    std::vector<double> expected;
    for (int64_t r = 0; r < t; ++r) {
        for (int64_t o = 0; o < out; ++o) {
            double sum = 0.0;
            for (int64_t k = 0; k < in; ++k) {
                const double value = x.at(r * (in + gap) + k);
                sum += (type == DType::bfloat16 ? rounded(value) : value) * w.at(o * in + k);
            }
            expected.push_back((scaled ? sum * scale.at(o) : sum) + (biased ? bias.at(o) : 0.0));
        }
    }
    const Projection weights{
        out,    in, packed.data(), type, scaled ? scale.floats() : nullptr, biased ? bias.floats() : nullptr,
        nullptr};
    check("linear", y, expected, 1e-4, type == DType::bfloat16, [&](int threads) {
        linear({weights, {t, x.data(), in + gap, x.dtype}, nullptr, {t, y.data(), out, y.dtype}}, threads);
    });
    const Integers row = {pick(0, out - 1)};
    Array back(type, in);
    unpack_rows(weights, row.data(), 1, back.data(), 2);
    const char* from = w.memory.get() + row[0] * in * bytes_of(type);
    if (std::memcmp(back.data(), from, size_t(back.bytes())) != 0) fail("unpacked weights differ");
}

void try_rows() {
    const int64_t t = pick(0, 9), h = pick(1, 200);
    Array x(any_dtype(), t * h), weight(DType::float32, h), y(any_dtype(), t * h), up(x.dtype, t * h);
    Array gated(x.dtype, t * h), logits(DType::float32, t * h), chances(DType::float32, t);
    std::vector<double> normed, product, squares, likeliest, nearest;
    const bool has_silu = coin();
    Integers tokens(static_cast<size_t>(t)), best(static_cast<size_t>(t));
    for (int64_t r = 0; r < t; ++r) {
        double length = 0.0, highest = -1e30, sum = 0.0;
        for (int64_t i = r * h; i < (r + 1) * h; ++i) {
            length += x.at(i) * x.at(i);
            squares.push_back(x.at(i) > 0.0 ? x.at(i) * x.at(i) : 0.0);
            highest = std::fmax(highest, logits.at(i));
        }
        for (int64_t i = 0; i < h; ++i) {
            normed.push_back(x.at(r * h + i) / std::sqrt(length / double(h) + 1e-5) * weight.at(i));
            const double gate = x.at(r * h + i);
            product.push_back((has_silu ? silu(gate) : gate) * up.at(r * h + i));
            sum += std::exp(logits.at(r * h + i) - highest);
        }
        likeliest.push_back(1.0 / sum);
        nearest.push_back(1.0 / (1.0 + std::exp(-highest)));
    }
    check("rms_norm", y, normed, 1e-5, false, [&](int threads) {
        rms_norm({t, h, x.data(), h, x.dtype, nullptr, 0, DType::float32, weight.floats(), 1e-5f, y.data(),
                  y.dtype},
                 threads);
    });
    check("silu_mul", gated, product, 1e-5, false, [&](int threads) {
        silu_mul({t, h, x.data(), h, up.data(), h, gated.data(), h, x.dtype, has_silu}, threads);
    });
    check("relu_square", gated, squares, 1e-5, false,
          [&](int threads) { relu_square({t, h, x.data(), h, gated.data(), h, x.dtype}, threads); });
    const Array bias(DType::float32, h, 0.0);
    check("route by sigmoids", chances, nearest, 1e-5, false, [&](int threads) {
        RoutingParams top{t, h, 1, logits.floats(), h, chances.floats(), best.data(), bias.floats()};
        route(top, threads);
        const std::string of_all(chances.memory.get(), size_t(chances.bytes()));
        if (h % 2 == 0) {  // its reads and writes alone: which group is used depends on rounding
            top.groups = h / 2;
            route(top, threads);
        }
        std::memcpy(chances.data(), of_all.data(), of_all.size());
    });
    check("route by a softmax", chances, likeliest, 1e-5, false,
          [&](int threads) { route({t, h, 1, logits.floats(), h, chances.floats(), best.data()}, threads); });
    for (double& chance : likeliest) chance = std::log(chance);
    check("logprob", chances, likeliest, 1e-5, false, [&](int threads) {
        logprob({t, h, logits.floats(), h, true, tokens.data(), chances.floats()}, threads);
    });
    if (tokens != best) fail("the likeliest token is not the first of the likeliest");
}

void try_head_rows() {
    const bool normed = coin();
    const int64_t t = pick(0, 9), heads = pick(1, 4), dim = pick(1, 150), pairs = pick(0, dim / 2);
    const int64_t row = heads * dim, gap = pick(0, 3), stride = row + gap;
    const DType type = any_dtype();
    Array x(type, t * stride), weight(DType::float32, dim), y(type, t * row), gate(type, t * row),
        gated(type, t * row);
    Integers steps, positions;
    for (int64_t i = 0; i < pairs; ++i) steps.push_back(pick(0, int64_t(1) << 62));
    for (int64_t r = 0; r < t; ++r) positions.push_back(coin() ? pick(0, 9) : pick(0, 1 << 20));
    std::vector<double> turned(size_t(t * row)), product;
    for (int64_t r = 0; r < t; ++r) {
        for (int64_t head = 0; head < heads; ++head) {
            double* to = turned.data() + r * row + head * dim;
            double squares = 0.0;
            for (int64_t i = 0; i < dim; ++i) {
                to[i] = x.at(r * stride + head * dim + i);
                squares += to[i] * to[i];
            }
            for (int64_t i = 0; normed && i < dim; ++i)
                to[i] = to[i] / std::sqrt(squares / double(dim) + 1e-5) * weight.at(i);
            for (int64_t i = 0; i < pairs; ++i) {
                const uint64_t part = uint64_t(positions[size_t(r)]) * uint64_t(steps[size_t(i)]);
                const double angle = std::ldexp(double(part), -64) * 2.0 * std::acos(-1.0);
                const double a = to[i], b = to[pairs + i];
                to[i] = a * std::cos(angle) - b * std::sin(angle);
                to[pairs + i] = b * std::cos(angle) + a * std::sin(angle);
            }
        }
        for (int64_t i = 0; i < row; ++i)
            product.push_back(x.at(r * stride + i) / (1.0 + std::exp(-gate.at(r * row + i))));
    }
    check("norm_rope", y, turned, 1e-5, false, [&](int threads) {
        norm_rope({t, heads, dim, x.data(), stride, normed ? weight.floats() : nullptr, 1e-5f, steps.data(),
                   pairs, positions.data(), y.data(), row, type},
                  threads);
    });
    check("sigmoid_mul", gated, product, 1e-5, false, [&](int threads) {
        sigmoid_mul({t, row, x.data(), stride, gate.data(), row, gated.data(), row, type}, threads);
    });
}

// A batch in which each sequence begins with zeros or its own slot, keeps a state midway, and its last.
struct Batch {
    Integers cu = {0}, initial, final, cuts = {0}, positions, slots;
    int64_t num_slots = 0;
    explicit Batch(int64_t longest) {
        for (int64_t s = pick(0, 5); s > 0; --s) {
            const int64_t length = pick(1, longest);
            initial.push_back(coin() ? num_slots++ : -1);
            if (coin()) {
                positions.push_back(pick(1, length));
                slots.push_back(num_slots++);
            }
            final.push_back(coin() ? num_slots++ : -1);
            cu.push_back(cu.back() + length);
            cuts.push_back(int64_t(positions.size()));
        }
    }
    int64_t sequences() const { return int64_t(initial.size()); }
    RaggedParams params() const {
        return {sequences(), cu.data(),        initial.data(), final.data(),
                cuts.data(), positions.data(), slots.data()};
    }
    // Calls keep(slot) where the state after token i of sequence s is kept.
    template <class Keep>
    void kept(int64_t s, int64_t i, const Keep& keep) const {
        for (int64_t c = cuts[size_t(s)]; c < cuts[size_t(s) + 1]; ++c) {
            if (positions[size_t(c)] == i + 1 - cu[size_t(s)]) keep(slots[size_t(c)]);
        }
        if (i + 1 == cu[size_t(s) + 1] && final[size_t(s)] >= 0) keep(final[size_t(s)]);
    }
};

void try_conv() {
    const Batch batch(90);
    const int64_t t = batch.cu.back(), d = pick(1, 150), w = pick(1, 8), past = w - 1;
    const DType type = any_dtype();
    const bool has_silu = coin();
    Array x(type, t * d), weight(DType::float32, d * w), state(type, batch.num_slots * past * d),
        out(type, t * d);
    const std::string begin(state.memory.get(), size_t(state.bytes()));
    std::vector<double> expected;
    for (int64_t s = 0; s < batch.sequences(); ++s) {
        for (int64_t i = batch.cu[size_t(s)]; i < batch.cu[size_t(s) + 1]; ++i) {
            for (int64_t c = 0; c < d; ++c) {
                double sum = 0.0;
                for (int64_t k = 0; k < w; ++k) {
                    const int64_t token = i - past + k, before = token - batch.cu[size_t(s)] + past;
                    const int64_t slot = batch.initial[size_t(s)];
                    if (token >= batch.cu[size_t(s)]) {
                        sum += weight.at(c * w + k) * x.at(token * d + c);
                    } else if (slot >= 0) {
                        sum += weight.at(c * w + k) * state.at((slot * past + before) * d + c);
                    }
                }
                expected.push_back(has_silu ? silu(sum) : sum);
            }
        }
    }
    check("causal_conv", out, expected, 1e-4, false, [&](int threads) {
        std::memcpy(state.data(), begin.data(), begin.size());
        causal_conv({batch.params(), type, d, w, x.data(), d, weight.floats(), nullptr, state.data(),
                     past * d, out.data(), d, has_silu},
                    threads);
    });
}

void try_scan() {
    const Batch batch(80);
    const int64_t t = batch.cu.back(), d = pick(1, 90), n = pick(1, 20);
    const DType type = any_dtype();
    Array x(type, t * d), dt(type, t * d, coin() ? 1.0 : 40.0), z(type, t * d), B(type, t * n),
        C(type, t * n);
    Array A(DType::float32, n * d), D(DType::float32, d), bias(DType::float32, d), out(type, t * d);
    Array state(DType::float32, batch.num_slots * n * d);
    for (int64_t i = 0; i < n * d; ++i) A.set(i, -std::fabs(float(A.at(i))));
    const std::string begin(state.memory.get(), size_t(state.bytes()));
    std::vector<double> expected(size_t(t * d)), after = worth(state), h(static_cast<size_t>(n));
    for (int64_t s = 0; s < batch.sequences(); ++s) {
        for (int64_t c = 0; c < d; ++c) {
            const int64_t slot = batch.initial[size_t(s)];
            for (int64_t j = 0; j < n; ++j) h[size_t(j)] = slot < 0 ? 0.0 : state.at((slot * n + j) * d + c);
            for (int64_t i = batch.cu[size_t(s)]; i < batch.cu[size_t(s) + 1]; ++i) {
                const double raw = dt.at(i * d + c) + bias.at(c);
                const double step = std::fmax(raw, 0.0) + std::log1p(std::exp(-std::fabs(raw)));
                double y = D.at(c) * x.at(i * d + c);
                for (int64_t j = 0; j < n; ++j) {
                    double& value = h[size_t(j)];
                    value =
                        std::exp(step * A.at(j * d + c)) * value + step * x.at(i * d + c) * B.at(i * n + j);
                    y += C.at(i * n + j) * value;
                }
                expected[size_t(i * d + c)] = y * silu(z.at(i * d + c));
                batch.kept(s, i, [&](int64_t to) {
                    for (int64_t j = 0; j < n; ++j) after[size_t((to * n + j) * d + c)] = h[size_t(j)];
                });
            }
        }
    }
    const auto run = [&](int threads) {
        std::memcpy(state.data(), begin.data(), begin.size());
        selective_scan({batch.params(), type,           d,     n,          x.data(), d,          dt.data(), d,
                        A.floats(),     B.data(),       n,     C.data(),   n,        D.floats(), z.data(),  d,
                        bias.floats(),  state.floats(), n * d, out.data(), d},
                       threads);
    };
    check("selective_scan", out, expected, 2e-2, false, run);
    check("the states of selective_scan", state, after, 2e-2, false, run);
}

void try_head_scan(HeadRule rule) {
    const Batch batch(80);
    const bool is_ssd = rule == HeadRule::ssd;
    const float dt_min = 0.1f, dt_max = 2.0f;
    const int64_t t = batch.cu.back(), key_heads = pick(1, 2), group = pick(1, 3), K = pick(1, 40);
    const int64_t lanes = pick(1, 70), blocks = pick(1, 2), heads = key_heads * group, V = lanes * blocks;
    const int64_t keys = key_heads * K, values = heads * V, block = K * lanes;
    const DType type = any_dtype();
    Array q(type, t * keys), k(type, t * keys), v(type, t * values), b(type, t * heads), a(type, t * heads);
    Array A(DType::float32, heads), bias(DType::float32, heads), D(DType::float32, heads);
    Array out(DType::float32, t * values);
    Array state(DType::float32, batch.num_slots * heads * blocks * block);
    for (int64_t i = 0; i < heads; ++i) A.set(i, -std::fabs(float(A.at(i))));
    const std::string begin(state.memory.get(), size_t(state.bytes()));
    std::vector<double> expected(size_t(t * values)), after = worth(state), S(static_cast<size_t>(K));
    const auto norm = [&](const Array& x, int64_t first) {
        if (is_ssd) return 1.0;
        double sum = 1e-6;
        for (int64_t i = 0; i < K; ++i) sum += x.at(first + i) * x.at(first + i);
        return 1.0 / std::sqrt(sum);
    };
    for (int64_t s = 0; s < batch.sequences(); ++s) {
        for (int64_t c = 0; c < values; ++c) {
            const int64_t slot = batch.initial[size_t(s)], head = c / V;
            const int64_t first = (head * blocks + c % V / lanes) * block + c % V % lanes;
            const auto place = [&](int64_t of, int64_t i) {
                return of * heads * blocks * block + first + i * lanes;
            };
            for (int64_t i = 0; i < K; ++i) S[size_t(i)] = slot < 0 ? 0.0 : state.at(place(slot, i));
            for (int64_t n = batch.cu[size_t(s)]; n < batch.cu[size_t(s) + 1]; ++n) {
                const int64_t key = n * keys + head / group * K;
                const double raw = a.at(n * heads + head) + bias.at(head);
                double step = std::fmax(raw, 0.0) + std::log1p(std::exp(-std::fabs(raw)));
                if (is_ssd) step = std::fmin(std::fmax(step, double(dt_min)), double(dt_max));
                const double decay = std::exp(A.at(head) * step), unit_k = norm(k, key);
                double read = 0.0, y = 0.0;
                for (int64_t i = 0; i < K; ++i) read += decay * k.at(key + i) * unit_k * S[size_t(i)];
                const double x = v.at(n * values + c);
                const double u = is_ssd ? step * x : (x - read) / (1.0 + std::exp(-b.at(n * heads + head)));
                for (int64_t i = 0; i < K; ++i) {
                    S[size_t(i)] = decay * S[size_t(i)] + k.at(key + i) * unit_k * u;
                    y += q.at(key + i) * S[size_t(i)];
                }
                expected[size_t(n * values + c)] =
                    is_ssd ? y + D.at(head) * x : y * norm(q, key) / std::sqrt(double(K));
                batch.kept(s, n, [&](int64_t to) {
                    for (int64_t i = 0; i < K; ++i) after[size_t(place(to, i))] = S[size_t(i)];
                });
            }
        }
    }
    HeadScanParams p{batch.params(),
                     rule,
                     type,
                     key_heads,
                     heads,
                     K,
                     V,
                     lanes,
                     q.data(),
                     keys,
                     k.data(),
                     keys,
                     v.data(),
                     values,
                     b.data(),
                     heads,
                     a.data(),
                     heads,
                     A.floats(),
                     bias.floats(),
                     D.floats(),
                     dt_min,
                     dt_max,
                     state.floats(),
                     heads * blocks * block,
                     out.floats(),
                     values,
                     V};
    Array memory(DType::float32, head_scan_floats(p, t));
    const auto run = [&](int threads) {
        std::memcpy(state.data(), begin.data(), begin.size());
        head_scan(p, memory.floats(), threads);
    };
    const std::string name = is_ssd ? "ssd" : "delta_rule";
    check(name, out, expected, 1e-3, false, run);
    check("the states of " + name, state, after, 1e-3, false, run);
}

void try_attention() {
    const int64_t b = pick(0, 4), kv_heads = pick(1, 3), group = pick(1, 4), heads = kv_heads * group;
    const int64_t dim = pick(1, 70), columns = 3, pages = b * columns, row = kv_heads * dim;
    const DType cached = any_dtype(), type = any_dtype();
    Integers cu = {0}, context, table, slots;
    for (int64_t page = 0; page < pages; ++page) table.push_back(pages - 1 - page);
    for (int64_t s = 0; s < b; ++s) {
        cu.push_back(cu.back() + pick(0, 60));
        context.push_back(pick(0, columns * kPageTokens - 60));
    }
    const int64_t t = cu.back();
    Array q(type, t * heads * dim), k(cached, pages * kPageTokens * row), v(cached, k.size),
        out(type, q.size);
    Array new_k(cached, t * row), new_v(cached, t * row);
    const auto slot_of = [&](int64_t s, int64_t key) {
        return table[size_t(s * columns + key / kPageTokens)] * kPageTokens + key % kPageTokens;
    };
    for (int64_t s = 0; s < b; ++s) {
        for (int64_t i = 0; i < cu[size_t(s) + 1] - cu[size_t(s)]; ++i)
            slots.push_back(slot_of(s, context[size_t(s)] + i));
    }
    write_kv({t, row, new_k.data(), row, new_v.data(), row, cached, k.data(), v.data(), cached, slots.data()},
             2);
    std::vector<double> expected;
    for (int64_t s = 0; s < b; ++s) {
        for (int64_t i = cu[size_t(s)]; i < cu[size_t(s) + 1]; ++i) {
            const int64_t seen = context[size_t(s)] + i - cu[size_t(s)] + 1;
            for (int64_t head = 0; head < heads; ++head) {
                std::vector<double> sums(size_t(dim), 0.0);
                double total = 0.0;
                for (int64_t key = 0; key < seen; ++key) {
                    const int64_t at = slot_of(s, key) * row + head / group * dim;
                    double score = 0.0;
                    for (int64_t c = 0; c < dim; ++c)
                        score += q.at((i * heads + head) * dim + c) * k.at(at + c);
                    const double weight = std::exp(0.1 * score);
                    total += weight;
                    for (int64_t c = 0; c < dim; ++c) sums[size_t(c)] += weight * v.at(at + c);
                }
                for (const double sum : sums) expected.push_back(sum / total);
            }
        }
    }
    AttentionParams p{b,           heads,     kv_heads,       dim,       0.1f,   q.data(),
                      heads * dim, type,      k.data(),       v.data(),  cached, table.data(),
                      columns,     cu.data(), context.data(), out.data()};
    const PagedSequences sequences{b, table.data(), columns, cu.data(), context.data(), nullptr};
    if (check_sequences(sequences, t, pages) != SequenceFault::none) fail("good sequences are refused");
    const bool halves = type == DType::bfloat16 && cached == DType::bfloat16;
    check("paged_attention", out, expected, 1e-4, halves, [&](int threads) { paged_attention(p, threads); });
}

// No tokens, and sequences without any: nothing may be divided by their number.
void try_nothing() {
    const Integers none = {0, 0, 0}, no_slots = {-1, -1};
    const RaggedParams ragged{2,           none.data(), no_slots.data(), no_slots.data(),
                              none.data(), nullptr,     nullptr};
    for (const int threads : {1, 4}) {
        int64_t channels = 0;
        for (const Unit& unit : partition(ragged, 100, 16, 64, threads)) {
            channels += unit.channels * (unit.sequence_end - unit.sequence_begin);
        }
        if (channels != 200) fail("empty sequences are not cut into units");
    }
}

}  // namespace

int main(int count, char** arguments) {
    if (count != 3) fail("driver SECONDS SEED");
    const auto begin = std::chrono::steady_clock::now();
    const std::chrono::duration<double> limit(std::atof(arguments[1]));
    generator.seed(std::strtoull(arguments[2], nullptr, 10));
    try_nothing();
    do {
        try_linear();
        try_rows();
        try_head_rows();
        try_conv();
        try_scan();
        try_head_scan(HeadRule::delta);
        try_head_scan(HeadRule::ssd);
        try_attention();
    } while (std::chrono::steady_clock::now() - begin < limit);
    std::printf("%lld comparisons\n", static_cast<long long>(comparisons));
}
