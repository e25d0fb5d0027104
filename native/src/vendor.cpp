#include "vendor.h"

#include <cstdlib>
#include <cstring>

#include <dlfcn.h>
#include <link.h>

namespace sft {

namespace {

struct Search {
    const std::string& stem;
    std::string found;
};

int look(dl_phdr_info* info, size_t, void* data) {
    auto* search = static_cast<Search*>(data);
    const char* slash = std::strrchr(info->dlpi_name, '/');
    const char* base = slash != nullptr ? slash + 1 : info->dlpi_name;
    size_t length = search->stem.size();
    // libcuda.so and libcuda.so.1, but not libcudart.so.
    if (std::strncmp(base, search->stem.c_str(), length) != 0 || (base[length] != '\0' && base[length] != '.'))
        return 0;
    search->found = info->dlpi_name;
    return 1;
}

}  // namespace

Vendor open_vendor(const std::string& stem, const std::vector<std::string>& names) {
    Vendor vendor;
    Search search{stem, ""};
    dl_iterate_phdr(look, &search);
    if (!search.found.empty()) {
        vendor.handle = dlopen(search.found.c_str(), RTLD_NOW | RTLD_NOLOAD);
        vendor.path = search.found;
        vendor.adopted = vendor.handle != nullptr;
    }
    for (const auto& name : names) {
        if (vendor.handle != nullptr) break;
        vendor.handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
        vendor.path = name;
        if (vendor.handle == nullptr) {
            const char* error = dlerror();
            // The first reason is the one for the usual name; a later one is only about another place.
            if (vendor.why.empty()) vendor.why = error != nullptr ? error : name + ": cannot be opened";
        }
    }
    if (vendor.handle == nullptr) vendor.path.clear();
    link_map* map = nullptr;
    if (vendor.handle != nullptr && dlinfo(vendor.handle, RTLD_DI_LINKMAP, &map) == 0) vendor.path = map->l_name;
    return vendor;
}

void* symbol_of(const Vendor& vendor, const char* name) {
    return vendor.handle != nullptr ? dlsym(vendor.handle, name) : nullptr;
}

}  // namespace sft
