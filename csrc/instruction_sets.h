// Instruction sets that the kernels are compiled for, the most basic first. The namespaces, the dispatch and
// the build (csrc/build_flags.py reads the rows) follow from this list.
//
// ISA(argument, name, kernels, attention, product, features):
//   name      its namespace, the suffix of its files, and the value of the option
//   kernels   the set whose kernels it uses; the matrix product is always its own
//   attention the set whose attention it uses
//   product   how bfloat16 is multiplied: sets with the same word give the same bits
//   features  required processor features, in the spelling of GCC's -m options
//
// To add a set, add a row here and its files: gemm_<name>.cpp, and the others too if it uses its own kernels.
// Also add it to apcbatch/config.py for users; a test compares the two.
#pragma once

// clang-format off: it would format the hyphens as minus signs
#if defined(__x86_64__)
#define APC_ISAS(ISA, argument)                                                                                    \
    ISA(argument, plain, plain, plain, widen, )                                                                    \
    ISA(argument, avx2, avx2, avx2, widen, APC_HAS(avx2) APC_HAS(fma))                                             \
    ISA(argument, avx512, avx512, avx512, widen,                                                                   \
        APC_HAS(avx2) APC_HAS(fma) APC_HAS(avx512f) APC_HAS(avx512bw) APC_HAS(avx512dq) APC_HAS(avx512vl))         \
    ISA(argument, avx512bf16, avx512, avx512, dp,                                                                  \
        APC_HAS(avx2) APC_HAS(fma) APC_HAS(avx512f) APC_HAS(avx512bw) APC_HAS(avx512dq) APC_HAS(avx512vl)          \
            APC_HAS(avx512bf16))                                                                                   \
    ISA(argument, amx, avx512, amx, amx,                                                                           \
        APC_HAS(avx2) APC_HAS(fma) APC_HAS(avx512f) APC_HAS(avx512bw) APC_HAS(avx512dq) APC_HAS(avx512vl)          \
            APC_HAS(amx-tile) APC_HAS(amx-bf16))
#else
#define APC_ISAS(ISA, argument) ISA(argument, plain, plain, plain, widen, )
#endif
