// Allocates and frees so many blocks of 100 bytes, 20 at a time with a pause after each 1,000, and keeps 50 more. With a second
// argument it goes on until its own functions lead to inline hooks, for 100 seconds at most, and 20,000 blocks longer. Says how many
// blocks it freed.
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

// Whether a page of code was replaced: besides the hooks' own code, another executable mapping is of their file.
static int is_hooked(void) {
    static char text[1 << 16];
    size_t bytes = 0;
    ssize_t read_now = 0;
    int file = open("/proc/self/maps", O_RDONLY);
    while (bytes < sizeof text - 1 && (read_now = read(file, text + bytes, sizeof text - 1 - bytes)) > 0)
        bytes += (size_t)read_now;
    close(file);
    text[bytes] = 0;
    int mapped = 0;
    for (char *line = text, *end; (end = strchr(line, '\n')); line = end + 1) {
        *end = 0;
        mapped += strstr(line, " r-xp ") && strstr(line, "/memfd:heapbpf-inline");
    }
    return mapped > 1;
}

int main(int count, char **arguments) {
    long blocks = count > 1 ? atol(arguments[1]) : 100000, pauses = 0;
    int waits = count > 2;
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
        if (done % 1000 != 0)
            continue;
        usleep(20000);
        if (!waits || done + 1000 < blocks || ++pauses > 5000)
            continue;
        waits = !is_hooked();
        blocks += waits ? 1000 : 20000;
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
