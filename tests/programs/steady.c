// Allocates and frees so many blocks of 100 bytes, 20 at a time with a pause after each 1,000, and keeps 50 more of 1,000 bytes. Says
// how many blocks it freed.
#include <stdlib.h>
#include <unistd.h>

int main(int count, char **arguments) {
    long blocks = count > 1 ? atol(arguments[1]) : 100000;
    void *volatile kept[50];
    for (int i = 0; i < 50; i++)
        kept[i] = malloc(1000);
    long done = 0;
    for (; done < blocks; done += 20) {
        void *volatile some[20];
        for (int i = 0; i < 20; i++)
            some[i] = malloc(100);
        for (int i = 0; i < 20; i++)
            free(some[i]);
        if (done % 1000 == 0)
            usleep(20000);
    }
    char text[24];
    int at = sizeof text;
    text[--at] = '\n';
    for (long rest = done; rest; rest /= 10)
        text[--at] = (char)('0' + rest % 10);
    if (write(1, text + at, sizeof text - (size_t)at) < 0)
        return 1;
    return kept[49] == NULL;
}
