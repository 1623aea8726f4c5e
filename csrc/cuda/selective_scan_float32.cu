#include "scan_dispatch.cuh"

template void apcbatch::cuda::selective_scan_of<float>(const ScanParams&, const Selection&, int,
                                                       cudaStream_t);
