// apcbatch._C: the module, and the selection of the instruction set.
#include "bindings.h"

#include "dispatch.h"
#include "scratch.h"

namespace {

bool set_isa(const std::string& name) {
    for (const apcbatch::Isa isa : apcbatch::kIsas) {
        if (name == apcbatch::isa_name(isa)) return apcbatch::set_isa(isa);
    }
    return false;
}

py::list available_isas() {
    py::list names;
    for (const apcbatch::Isa isa : apcbatch::kIsas) {
        if (apcbatch::isa_available(isa)) names.append(apcbatch::isa_name(isa));
    }
    return names;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
    m.doc() =
        "apcbatch kernels: plain C++ over views, addresses and sizes (private; see apcbatch.kernels.ops)";
    m.def("isa", [] { return apcbatch::isa_name(apcbatch::isa()); });
    m.def("isa_product", [] { return apcbatch::isa_product(apcbatch::isa()); });
    m.def("set_isa", &set_isa);  // returns false if the name is unknown or the processor lacks it
    m.def("available_isas", &available_isas);
    bind_linear(m);
    bind_rows(m);
    bind_attention(m);
    bind_recurrent(m);
    bind_layers(m);
    bind_stack(m);
    bind_drafts(m);
    m.def("refuse_scratch", &apcbatch::refuse_scratch);  // for tests
}
