// Conditions at which a checked build (-DCHAIRLIFT_CHECKED) stops; in other builds they are not evaluated.
#pragma once

#ifdef CHAIRLIFT_CHECKED
#define CHECK(condition) ((condition) ? void() : __builtin_trap())
#else
#define CHECK(condition) void(sizeof(!(condition)))
#endif
