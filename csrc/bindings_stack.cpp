// A model's whole pass in one call for Python (pybind11). What stays the same from pass to pass is given
// once.
#include <vector>

#include "bindings.h"
#include "stack.h"

namespace apcbatch {
namespace {

AttentionMixerParams attention_mixer_params(const PreNorm& norm, const Projection& qkv_proj,
                                            const Projection& o_proj, std::int64_t heads,
                                            std::int64_t kv_heads, std::int64_t head_dim, float scale,
                                            const View& k_cache, const View& v_cache) {
    AttentionMixerParams p;
    p.norm = norm;
    p.dtype = qkv_proj.dtype;
    p.qkv_proj = qkv_proj;
    p.o_proj = o_proj;
    p.heads = heads;
    p.kv_heads = kv_heads;
    p.head_dim = head_dim;
    p.scale = scale;
    p.k_cache = values(k_cache, kMaybe);
    p.v_cache = values(v_cache, k_cache.dtype, kMaybe);
    p.cache_dtype = k_cache.dtype;
    return p;
}

// mixer: Mixer or AttentionMixer; norm and feed_forward: that of an Mlp or a Mixture, or both None.
Layer layer(const py::handle& mixer, const py::handle& norm, const py::handle& feed_forward) {
    Layer one;
    if (py::isinstance<MixerParams>(mixer)) {
        one.mixer = mixer.cast<MixerParams>();
    } else {
        one.mixer = mixer.cast<AttentionMixerParams>();
    }
    if (feed_forward.is_none()) return one;
    one.norm = norm.cast<PreNorm>();
    if (py::isinstance<MlpParams>(feed_forward)) {
        one.feed_forward = feed_forward.cast<MlpParams>();
    } else {
        one.feed_forward = feed_forward.cast<MixtureParams>();
    }
    return one;
}

StackParams stack_params(const py::list& layers, const PreNorm& norm, const Projection& head,
                         Address embedding) {
    StackParams p;
    for (const py::handle one : layers) {
        const py::tuple parts = py::reinterpret_borrow<py::tuple>(one);
        p.layers.push_back(layer(parts[0], parts[1], parts[2]));
    }
    p.norm = norm;
    p.head = head;
    p.embedding = values({embedding, 0, head.dtype}, kMaybe);
    return p;
}

// Where the sequences have their keys and values, as for paged_attention; where each token's go; how many
// pages there are.
using Pages = std::tuple<Address, std::int64_t, Address, Address, std::int64_t>;
// Of rows of the residual: how many, their numbers, where what is wanted of them goes.
using Wanted = std::tuple<std::int64_t, Address, Address>;

// A pass by the addresses of its numbers, which may be others in the next one, and room for what it chooses.
struct BoundPass {
    PassParams params;
    std::vector<std::int64_t> likeliest;
    std::vector<float> logprobs;  // none where they are not wanted
};

BoundPass bound_pass(Address tokens, const RaggedParams& ragged, const Pages& pages, const Wanted& logits,
                     const Wanted& hidden, bool with_logprobs) {
    BoundPass pass;
    PassParams& p = pass.params;
    const std::int64_t b = ragged.num_sequences;
    p.tokens = integers(tokens, b);
    p.ragged = ragged;
    p.sequences.num_sequences = b;
    p.sequences.page_table = integers(std::get<0>(pages), kMaybe);
    p.sequences.page_table_stride = std::get<1>(pages);
    p.sequences.cu_seqlens = ragged.cu_seqlens;
    p.sequences.context = integers(std::get<2>(pages), kMaybe);
    p.sequences.token_slots = integers(std::get<3>(pages), kMaybe);
    p.num_pages = std::get<4>(pages);
    const std::int64_t r = std::get<0>(logits), s = std::get<0>(hidden);
    p.for_logits = {r, integers(std::get<1>(logits), r)};
    p.logits = floats(std::get<2>(logits), r);
    pass.likeliest.resize(std::size_t(r));
    pass.logprobs.resize(with_logprobs ? std::size_t(r) : 0);
    p.for_hidden = {s, integers(std::get<1>(hidden), s)};
    p.hidden = checked(std::get<2>(hidden), s, 1);
    return pass;
}

template <class Number>
py::list list_of(const std::vector<Number>& numbers) {
    py::list all(numbers.size());
    for (std::size_t i = 0; i < numbers.size(); ++i) all[i] = numbers[i];
    return all;
}

// on_layer: None or to be called. The likeliest tokens and, if they are wanted, their log-probabilities, as
// lists; None where a number of the pass names nothing that is there.
py::object bound_run_stack(const StackParams& stack, BoundPass& pass, const py::object& on_layer,
                           int num_threads) {
    PassParams& p = pass.params;
    p.likeliest = pass.likeliest.data();
    p.logprobs = pass.logprobs.empty() ? nullptr : pass.logprobs.data();
    std::function<void()> tell;
    if (!on_layer.is_none()) {
        tell = [&on_layer] {
            const py::gil_scoped_acquire python;
            on_layer();
        };
    }
    if (!fits(stack, p)) return py::none();
    {
        const py::gil_scoped_release others;
        run_stack(stack, p, tell, num_threads);
    }
    return py::make_tuple(list_of(pass.likeliest), list_of(pass.logprobs));
}

}  // namespace
}  // namespace apcbatch

void bind_stack(py::module_& m) {
    using namespace apcbatch;
    using namespace py::literals;
    py::class_<AttentionMixerParams>(m, "AttentionMixer")
        .def(py::init(&attention_mixer_params), py::kw_only(), "norm"_a, "qkv_proj"_a, "o_proj"_a, "heads"_a,
             "kv_heads"_a, "head_dim"_a, "scale"_a, "k_cache"_a, "v_cache"_a);
    py::class_<BoundPass>(m, "Pass").def(py::init(&bound_pass));
    py::class_<StackParams>(m, "Stack").def(py::init(&stack_params)).def("run", &bound_run_stack);
}
