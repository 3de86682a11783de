// One translation unit: torch's headers, which take most of the time to compile, are read once and not six times.
#include "memory.cpp"
#include "runtime.cpp"
#include "ops.cpp"
#include "autocast.cpp"
#include "collective.cpp"
#include "bindings.cpp"
