#include "parts.h"

#include <chrono>

namespace apcbatch {
namespace {

struct Record {
    bool on = false;
    double seconds[kParts] = {};
};

Record& record() {
    thread_local Record value;
    return value;
}

}  // namespace

double clock_s() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

bool recording_parts() { return record().on; }

void add_part(Part part, double seconds) { record().seconds[int(part)] += seconds; }

void record_parts(bool on) {
    if (on) record() = Record{};
    record().on = on;
}

const double* part_seconds() { return record().seconds; }

PartTimer::PartTimer(Part part) : part_(part), begin_(record().on ? clock_s() : -1.0) {}

PartTimer::~PartTimer() {
    if (begin_ >= 0.0) record().seconds[int(part_)] += clock_s() - begin_;
}

}  // namespace apcbatch
