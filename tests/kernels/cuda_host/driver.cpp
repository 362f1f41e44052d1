// One kernel of ours as a function of the host: compiled with -DPOSTLUDE_HOST and the kernel's own definitions.
#include "cuda_host.h"

#ifndef SHARED_BYTES
#define SHARED_BYTES 0
#endif
uint4 shared[SHARED_BYTES / 16 + 1];

#include POSTLUDE_KERNEL

#include <tuple>
#include <utility>

template <class... A, std::size_t... I>
static void call(void (*kernel)(A...), const std::int64_t* slots, std::index_sequence<I...>)
{
    // Arguments lie in slots of 8 bytes, low end first, as the driver would read them.
    std::tuple<A...> values;
    (std::memcpy(&std::get<I>(values), slots + I, sizeof(A)), ...);
    kernel(std::get<I>(values)...);
}

template <class... A>
static constexpr int count(void (*)(A...)) { return sizeof...(A); }

template <class... A>
static void run(void (*kernel)(A...), const std::int64_t* slots)
{
    call(kernel, slots, std::index_sequence_for<A...>());
}

// 0, 1 where threads wait for one another for ever, 2 where the arguments are not as many as the kernel's
extern "C" int launch(int grid_x, int grid_y, int threads, const std::int64_t* slots, int arguments)
{
    if (arguments != count(POSTLUDE_ENTRY)) return 2;
    host::grid = {grid_x, grid_y};
    static const std::int64_t* given;
    given = slots;
    host::body = [] { run(POSTLUDE_ENTRY, given); };
    for (int y = 0; y < grid_y; y++)
        for (int x = 0; x < grid_x; x++) {
            host::block = {x, y};
            std::memset(shared, 0xff, sizeof(shared));  // NaN in every format
            if (!host::run_block(threads)) return 1;
        }
    return 0;
}
