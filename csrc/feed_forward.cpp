#include "feed_forward.h"

#include <cstring>

#include "parts.h"
#include "scan.h"
#include "share.h"

namespace apcbatch {
namespace {

std::int64_t hidden_bytes(const ExpertParams& p, std::int64_t t) {
    return t * p.gate_up.out * bytes_of(p.dtype);
}

// Replaces the first f columns of each row by silu(gate) * up, or by the square of relu(up).
void activate_in_place(const ExpertParams& p, std::int64_t t, char* hidden, int num_threads) {
    const PartTimer timer(Part::gated_product);
    const std::int64_t f = p.down.in;
    if (!p.is_gated) {
        relu_square({t, f, hidden, f, hidden, f, p.dtype}, num_threads);
        return;
    }
    SiluMulParams product;
    product.t = t;
    product.f = f;
    product.gate = product.y = hidden;
    product.gate_stride = product.up_stride = product.y_stride = 2 * f;
    product.up = hidden + f * bytes_of(p.dtype);
    product.dtype = p.dtype;
    silu_mul(product, num_threads);
}

// Computes an expert's y for the t rows of x in x_rows. hidden: hidden_bytes(p, t) bytes.
void run_expert(const ExpertParams& p, std::int64_t t, const Rows& x, const std::int64_t* x_rows,
                char* hidden, float* y, int num_threads) {
    const std::int64_t h = p.gate_up.in;
    const Rows gate_up{t, hidden, p.gate_up.out, p.dtype};
    project(p.gate_up, x, x_rows, gate_up, num_threads);                        // (t, h) -> (t, 2f) or (t, f)
    activate_in_place(p, t, hidden, num_threads);                               // its first f columns
    project(p.down, gate_up, nullptr, {t, y, h, DType::float32}, num_threads);  // (t, f) -> (t, h)
}

// Multiplies each row of y (t, h) by the sigmoid of its logit, gate x. logits: (t), overwritten.
void gate_rows(const Projection& gate, const Rows& x, float* logits, float* y, int num_threads) {
    project(gate, x, nullptr, {x.t, logits, 1, DType::float32}, num_threads);  // (t, h) -> (t, 1)
    const PartTimer timer(Part::gated_product);
    elementwise(Elementwise::sigmoid, logits, logits, x.t);
    const std::int64_t h = gate.in;
    share_rows(x.t, h, num_threads, 0, [&](std::int64_t begin, std::int64_t end, char*) {
        for (std::int64_t r = begin; r < end; ++r) {
            for (std::int64_t c = 0; c < h; ++c) y[r * h + c] *= logits[r];
        }
    });
}

// Working memory of an MLP.
struct MlpMemory {
    char* hidden;
    Rows normed;
    float* logits;  // of the gate
    std::int64_t bytes;

    MlpMemory(const Mlp& p, std::int64_t t, char* memory) {
        Workspace parts(memory);
        hidden = parts.take<char>(hidden_bytes(p.expert, t));
        normed = parts.rows(t, p.expert.gate_up.in, p.expert.dtype);
        logits = parts.take<float>(t * p.gate.out);
        bytes = parts.bytes();
    }
};

// Tokens grouped by expert: those of expert e are tokens[begin[e]] to tokens[begin[e + 1] - 1], ascending.
struct Routing {
    std::int64_t* begin;   // (experts + 1)
    std::int64_t* tokens;  // (t k)
    float* weights;        // (t k), parallel to tokens
};

void choose_experts(const Mixture& p, const Rows& x, float* logits, float* weights, std::int64_t* experts,
                    int num_threads) {
    const std::int64_t n = p.router.out;
    project(p.router, x, nullptr, {x.t, logits, n, DType::float32}, num_threads);  // (t, h) -> (t, n)
    const PartTimer timer(Part::routing);
    RoutingParams rule = p.rule;
    rule.t = x.t;
    rule.logits = logits;
    rule.weights = weights;
    rule.indices = experts;
    route(rule, num_threads);
}

// Groups the t k (token, expert) pairs by expert, by a counting sort that keeps the order of the tokens.
void group_by_expert(std::int64_t t, std::int64_t k, std::int64_t num_experts, const std::int64_t* experts,
                     const float* weights, const Routing& routing) {
    const PartTimer timer(Part::routing);
    std::memset(routing.begin, 0, sizeof(std::int64_t) * std::size_t(num_experts + 1));
    for (std::int64_t i = 0; i < t * k; ++i) ++routing.begin[experts[i] + 1];
    for (std::int64_t e = 0; e < num_experts; ++e) routing.begin[e + 1] += routing.begin[e];
    for (std::int64_t i = 0; i < t * k; ++i) {
        const std::int64_t at = routing.begin[experts[i]]++;
        routing.tokens[at] = i / k;
        routing.weights[at] = weights[i];
    }
    for (std::int64_t e = num_experts; e > 0; --e) routing.begin[e] = routing.begin[e - 1];
    routing.begin[0] = 0;
}

// Computes y[tokens[i]] += parts[i] * weights[i], with the product rounded first.
void add_weighted(const float* parts, const std::int64_t* tokens, const float* weights, std::int64_t count,
                  std::int64_t h, float* y, int num_threads) {
    const PartTimer timer(Part::routing);
    share_rows(count, h, num_threads, 0, [&](std::int64_t begin, std::int64_t end, char*) {
        for (std::int64_t i = begin; i < end; ++i) {
            const float* part = parts + i * h;
            float* to = y + tokens[i] * h;
            const float weight = weights[i];
            for (std::int64_t c = 0; c < h; ++c) to[c] += part[c] * weight;
        }
    });
}

// Working memory of a mixture.
struct MixtureMemory {
    float *logits, *weights, *part;
    Rows sums;
    std::int64_t* experts;
    Routing routing;
    char* hidden;
    Rows normed, latent;
    std::int64_t bytes;

    MixtureMemory(const Mixture& p, std::int64_t t, char* memory) {
        const std::int64_t n = p.router.out, k = p.rule.k, inner = p.experts[0].gate_up.in;
        const std::int64_t l = p.is_latent() ? inner : 0;
        const DType dtype = p.experts[0].dtype;
        Workspace parts(memory);
        logits = parts.take<float>(t * n);
        weights = parts.take<float>(t * k);
        experts = parts.take<std::int64_t>(t * k);
        routing.begin = parts.take<std::int64_t>(n + 1);
        routing.tokens = parts.take<std::int64_t>(t * k);
        routing.weights = parts.take<float>(t * k);
        part = parts.take<float>(t * inner);
        hidden = parts.take<char>(hidden_bytes(p.experts[0], t));
        normed = parts.rows(t, p.router.in, dtype);
        latent = parts.rows(t, l, dtype);
        sums = parts.rows(t, l, DType::float32);
        bytes = parts.bytes();
    }
};

}  // namespace

std::int64_t Mlp::scratch_bytes(std::int64_t t) const { return MlpMemory(*this, t, nullptr).bytes; }

void Mlp::run(const SubBlockInputs& inputs, const Residual& residual, char* memory, int num_threads) const {
    const MlpMemory at(*this, inputs.t, memory);
    pre_norm(norm, residual, at.normed, num_threads);
    run_expert(expert, inputs.t, at.normed, nullptr, at.hidden, residual.delta, num_threads);
    if (gate.out > 0) gate_rows(gate, at.normed, at.logits, residual.delta, num_threads);
}

std::int64_t Mixture::scratch_bytes(std::int64_t t) const { return MixtureMemory(*this, t, nullptr).bytes; }

void Mixture::run(const SubBlockInputs& inputs, const Residual& residual, char* memory,
                  int num_threads) const {
    const std::int64_t t = inputs.t, h = router.in, n = router.out, k = rule.k;
    const MixtureMemory at(*this, t, memory);
    const Rows out{t, residual.delta, h, DType::float32};
    pre_norm(norm, residual, at.normed, num_threads);
    choose_experts(*this, at.normed, at.logits, at.weights, at.experts, num_threads);
    group_by_expert(t, k, n, at.experts, at.weights, at.routing);
    const Rows &x = is_latent() ? at.latent : at.normed, &y = is_latent() ? at.sums : out;
    if (is_latent()) project(latent_in, at.normed, nullptr, x, num_threads);  // (t, h) -> (t, l)
    float* sums = static_cast<float*>(y.data);
    std::memset(sums, 0, sizeof(float) * std::size_t(t * y.stride));
    for (std::int64_t e = 0; e < n; ++e) {
        const std::int64_t first = at.routing.begin[e], count = at.routing.begin[e + 1] - first;
        if (count == 0) continue;
        const std::int64_t* tokens = at.routing.tokens + first;
        run_expert(experts[std::size_t(e)], count, x, tokens, at.hidden, at.part, num_threads);
        add_weighted(at.part, tokens, at.routing.weights + first, count, y.stride, sums, num_threads);
    }
    if (is_latent()) project(latent_out, y, nullptr, out, num_threads);  // (t, l) -> (t, h)
}

}  // namespace apcbatch
