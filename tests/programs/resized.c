// Calls reallocarray 6,000 times, 600 times in each of 10 rounds, with a pause before each.
#define _GNU_SOURCE
#include <stdlib.h>
#include <unistd.h>

int main(void) {
    for (int round = 0; round < 10; round++) {
        usleep(200000);
        for (int i = 0; i < 300; i++) {
            void *volatile block = reallocarray(NULL, 10, 7);
            block = reallocarray(block, 20, 9);
            free(block);
        }
    }
    return 0;
}
