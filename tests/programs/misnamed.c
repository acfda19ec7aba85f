// Allocates in a function with an ordinary C++ name, and in one whose name takes a C++ demangler practically for ever.
#include <stdlib.h>

#define TEN "dldldldldldldldldldl"

__attribute__((noinline)) void *named(unsigned long size) __asm__("_Z5namedm");
__attribute__((noinline)) void *misnamed(unsigned long size) __asm__("_Z1fIX" TEN TEN TEN TEN TEN TEN);

void *named(unsigned long size) {
    void *volatile block = malloc(size);
    return block;
}

void *misnamed(unsigned long size) {
    void *volatile block = malloc(size);
    return block;
}

int main(void) {
    for (int round = 0; round < 100; ++round) {
        free(misnamed(1000));
        free(named(2000));
    }
    return 0;
}
