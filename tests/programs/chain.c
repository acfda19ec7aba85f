/* PROGRAMS BLOCKS: allocates and frees so many blocks of 100 bytes, keeps one more, and executes itself, until so many programs
 * have run in this process. */
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

int main(int count, char **arguments) {
    long programs = count > 1 ? atol(arguments[1]) : 20, blocks = count > 2 ? atol(arguments[2]) : 100;
    for (long i = 0; i < blocks; i++) {
        void *volatile block = malloc(100);
        free(block);
    }
    void *volatile kept = malloc(50);
    if (programs > 1) {
        char rest[24];
        snprintf(rest, sizeof rest, "%ld", programs - 1);
        execl("/proc/self/exe", "chain", rest, arguments[2], (char *)0);
        return 1;
    }
    return kept == NULL;
}
