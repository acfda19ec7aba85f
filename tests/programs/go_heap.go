// A Go program with a known heap. It writes its own heap profile (debug=1) to the file of its first argument, says READY with
// its process id, and waits until its standard input ends. The second argument is its MemProfileRate.
package main

import (
	"fmt"
	"io"
	"os"
	"runtime"
	"runtime/pprof"
	"strconv"
)

type node struct {
	next *node
	data [200]byte
}

var (
	nodes   *node
	kept    [][]byte
	dropped []byte
)

func inlined(size int) []byte {
	return make([]byte, size)
}

func list(count int) {
	for i := 0; i < count; i++ {
		nodes = &node{next: nodes}
	}
}

func generic[T any](count int) []T {
	return make([]T, count)
}

func recurse(depth int) {
	if depth > 0 {
		recurse(depth - 1)
		return
	}
	kept = append(kept, inlined(5000))
}

func churn(count int) {
	for i := 0; i < count; i++ {
		dropped = make([]byte, 3000+i%7)
	}
}

var (
	floats  []float64
	strings []string
	table   = map[string]int{}
)

func main() {
	rate, err := strconv.Atoi(os.Args[2])
	if err != nil {
		panic(err)
	}
	runtime.MemProfileRate = rate
	list(1000)
	for i := 0; i < 300; i++ {
		kept = append(kept, inlined(1000+i))
	}
	floats, strings = generic[float64](9000), generic[string](400)
	for i := 0; i < 500; i++ {
		table[strconv.Itoa(i)] = i
	}
	recurse(3)
	recurse(60)
	churn(2000)
	// What is allocated in one cycle is published after the next one.
	for i := 0; i < 3; i++ {
		runtime.GC()
	}
	out, err := os.Create(os.Args[1])
	if err != nil {
		panic(err)
	}
	if err := pprof.Lookup("heap").WriteTo(out, 1); err != nil {
		panic(err)
	}
	out.Close()
	fmt.Println("READY", os.Getpid())
	io.Copy(io.Discard, os.Stdin)
}
