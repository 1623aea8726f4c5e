#include "scan_dispatch.cuh"

template void apcbatch::cuda::selective_scan_of<__nv_bfloat16>(const ScanParams&, const Selection&, int,
                                                               cudaStream_t);
