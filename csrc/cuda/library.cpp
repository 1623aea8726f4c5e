// Call cuBLASLt by function names in the loaded library. So a build needs neither its headers nor a specific
// version. The constants are those of cublasLt.h, which keeps them from version to version.
#include "library.h"

#include <dlfcn.h>

#include <map>
#include <mutex>
#include <stdexcept>
#include <string>

namespace apcbatch {
namespace cuda {
namespace {

using Handle = void*;

enum { kFloat32 = 0, kBfloat16 = 14, kComputeFloat32 = 68, kTransposed = 1 };
enum { kBatchCount = 5, kBatchOffset = 6 };  // attributes of a matrix layout
enum { kTransposeA = 3 };                    // attribute of a product's descriptor
enum {
    kMostWorkspace = 1,
    kReductions = 3,
    kAlignA = 5,
    kAlignB = 6,
    kAlignC = 7,
    kAlignD = 8
};  // attributes of a preference

struct Found {  // cublasLtMatmulHeuristicResult_t
    LibraryChoice choice;
    std::size_t workspace;
    int status;
    float waves;
    int reserved[4];
};

struct Functions {
    int (*create)(Handle*);
    int (*desc_create)(void**, int, int);
    int (*desc_set)(void*, int, const void*, std::size_t);
    int (*desc_destroy)(void*);
    int (*layout_create)(void**, int, std::uint64_t, std::uint64_t, std::int64_t);
    int (*layout_set)(void*, int, const void*, std::size_t);
    int (*layout_destroy)(void*);
    int (*preference_create)(void**);
    int (*preference_set)(void*, int, const void*, std::size_t);
    int (*preference_destroy)(void*);
    int (*heuristic)(Handle, void*, void*, void*, void*, void*, void*, int, Found*, int*);
    int (*matmul)(Handle, void*, const void*, const void*, void*, const void*, void*, const void*,
                  const void*, void*, void*, void*, const LibraryChoice*, void*, std::size_t, cudaStream_t);
};

void require(int status, const char* what) {
    if (status)
        throw std::runtime_error(std::string(what) + " failed in cuBLASLt with status " +
                                 std::to_string(status));
}

const Functions& functions() {
    static const Functions all = [] {
        void* library = nullptr;
        for (const char* name : {"libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so.14"}) {
            if (!library) library = dlopen(name, RTLD_NOW | RTLD_NOLOAD);
        }
        if (!library)
            throw std::runtime_error(
                "cuBLASLt (versions 12 to 14) is not loaded in this process, so there are no exact products: "
                "install torch with CUDA as a wheel");
        const auto find = [&](auto& function, const char* name) {
            function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
            if (!function) throw std::runtime_error(std::string("cuBLASLt has no ") + name);
        };
        Functions f;
        find(f.create, "cublasLtCreate");
        find(f.desc_create, "cublasLtMatmulDescCreate");
        find(f.desc_set, "cublasLtMatmulDescSetAttribute");
        find(f.desc_destroy, "cublasLtMatmulDescDestroy");
        find(f.layout_create, "cublasLtMatrixLayoutCreate");
        find(f.layout_set, "cublasLtMatrixLayoutSetAttribute");
        find(f.layout_destroy, "cublasLtMatrixLayoutDestroy");
        find(f.preference_create, "cublasLtMatmulPreferenceCreate");
        find(f.preference_set, "cublasLtMatmulPreferenceSetAttribute");
        find(f.preference_destroy, "cublasLtMatmulPreferenceDestroy");
        find(f.heuristic, "cublasLtMatmulAlgoGetHeuristic");
        find(f.matmul, "cublasLtMatmul");
        return f;
    }();
    return all;
}

// Returns the device's handle. Handles are never destroyed, as the library may be unloaded before.
Handle handle() {
    static std::mutex mutex;
    static std::map<int, Handle> handles;
    int device = 0;
    check(cudaGetDevice(&device), "the current device");
    const std::lock_guard<std::mutex> lock(mutex);
    Handle& one = handles[device];
    if (!one) require(functions().create(&one), "cublasLtCreate");
    return one;
}

int type_of(DType dtype) { return dtype == DType::float32 ? kFloat32 : kBfloat16; }

// Product for cuBLASLt, whose matrices are column-major: y^T (out, rows) = W (out, in) x^T (in, rows), W
// transposed.
class Problem {
  public:
    Problem(const ProductParams& p, bool in_turn) {
        const Functions& f = functions();
        require(f.desc_create(&desc, kComputeFloat32, kFloat32), "the description of a product");
        const std::int32_t transposed = kTransposed;
        require(f.desc_set(desc, kTransposeA, &transposed, sizeof transposed), "the transposition");
        const int from = type_of(p.dtype), to = type_of(p.y_dtype);
        const int piece = p.in / p.pieces;
        require(f.layout_create(&weight, from, std::uint64_t(piece), std::uint64_t(p.out), p.in), "W");
        require(f.layout_create(&x, from, std::uint64_t(piece), std::uint64_t(p.rows), p.x_stride), "x");
        require(f.layout_create(&y, to, std::uint64_t(p.out), std::uint64_t(p.rows), p.out), "y");
        if (p.pieces == 1 || in_turn) return;
        repeat(weight, p.pieces, piece);
        repeat(x, p.pieces, piece);
        repeat(y, p.pieces, std::int64_t(p.rows) * p.out);
    }
    Problem(const Problem&) = delete;
    Problem& operator=(const Problem&) = delete;
    ~Problem() {
        const Functions& f = functions();
        if (desc) f.desc_destroy(desc);
        for (void* layout : {weight, x, y}) {
            if (layout) f.layout_destroy(layout);
        }
    }

    // Makes a layout a batch of `count` matrices, `apart` elements apart.
    static void repeat(void* layout, std::int32_t count, std::int64_t apart) {
        const auto set = functions().layout_set;
        require(set(layout, kBatchCount, &count, sizeof count), "a batch");
        require(set(layout, kBatchOffset, &apart, sizeof apart), "a batch's offset");
    }

    void *desc = nullptr, *weight = nullptr, *x = nullptr, *y = nullptr;
};

// Returns the largest power of two up to 16 that divides both an address and the bytes of a row.
std::uint32_t alignment(const void* at, std::int64_t row_bytes) {
    std::uint32_t bytes = 16;
    while (bytes > 2 && (reinterpret_cast<std::uintptr_t>(at) % bytes || row_bytes % bytes)) bytes /= 2;
    return bytes;
}

}  // namespace

std::vector<LibraryChoice> library_choices(const ProductParams& p, bool in_turn, int most) {
    const Functions& f = functions();
    const Problem problem(p, in_turn);
    void* preference = nullptr;
    require(f.preference_create(&preference), "a preference");
    const std::uint64_t workspace = 0;
    const std::int64_t size = std::int64_t(bytes_of(p.dtype));
    const std::uint32_t none = 0, a = alignment(p.weight, p.in * size), b = alignment(p.x, p.x_stride * size),
                        c = alignment(p.y, p.out * std::int64_t(bytes_of(p.y_dtype)));
    f.preference_set(preference, kMostWorkspace, &workspace, sizeof workspace);
    f.preference_set(preference, kReductions, &none, sizeof none);  // no split-K
    f.preference_set(preference, kAlignA, &a, sizeof a);
    f.preference_set(preference, kAlignB, &b, sizeof b);
    f.preference_set(preference, kAlignC, &c, sizeof c);
    f.preference_set(preference, kAlignD, &c, sizeof c);
    std::vector<Found> found(std::size_t(most), Found{});
    int count = 0;
    const int status = f.heuristic(handle(), problem.desc, problem.weight, problem.x, problem.y, problem.y,
                                   preference, most, found.data(), &count);
    f.preference_destroy(preference);
    std::vector<LibraryChoice> choices;
    for (int i = 0; status == 0 && i < count; ++i) {
        if (found[std::size_t(i)].status == 0) choices.push_back(found[std::size_t(i)].choice);
    }
    return choices;
}

bool library_product(const ProductParams& p, bool in_turn, const LibraryChoice& choice, cudaStream_t stream) {
    const Problem problem(p, in_turn);
    const float one = 1.0f, zero = 0.0f;
    const std::size_t piece_bytes = std::size_t(p.in / p.pieces) * bytes_of(p.dtype);
    for (int piece = 0; piece < (in_turn ? p.pieces : 1); ++piece) {
        const char *weight = static_cast<const char*>(p.weight) + std::size_t(piece) * piece_bytes,
                   *x = static_cast<const char*>(p.x) + std::size_t(piece) * piece_bytes;
        const int status = functions().matmul(handle(), problem.desc, &one, weight, problem.weight, x,
                                              problem.x, piece ? &one : &zero, p.y, problem.y, p.y, problem.y,
                                              &choice, nullptr, 0, stream);
        if (status) return false;
    }
    return true;
}

}  // namespace cuda
}  // namespace apcbatch
