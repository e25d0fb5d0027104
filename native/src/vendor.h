// Finding the vendor's libraries at run time.
#pragma once

#include <string>
#include <vector>

namespace sft {

// A library that was opened; never closed, because neither CUDA nor HIP can be.
struct Vendor {
    void* handle = nullptr;
    std::string path;
    bool adopted = false;  // the process had it loaded already
    std::string why;       // when there is none
};

// First the copy that the process has loaded, under whatever name: two copies of HIP in one process break each other.
// Else the versioned names: an unversioned one may lead to a release with other struct layouts.
Vendor open_vendor(const std::string& stem, const std::vector<std::string>& names);

void* symbol_of(const Vendor& vendor, const char* name);

}  // namespace sft
