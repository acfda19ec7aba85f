// Native memory from known Java call paths: direct buffers, zlib, and what the JVM allocates for itself. Follows the protocol
// of truth.h: prints READY, waits for a line, works, prints DONE, and waits for another line.

import java.nio.ByteBuffer;
import java.util.ArrayList;
import java.util.List;
import java.util.function.IntSupplier;
import java.util.zip.Deflater;
import java.util.zip.Inflater;

public class JavaTruth {
    /** What is in use at the end. */
    static final List<Object> kept = new ArrayList<>();

    /** Sizes are large enough that every call is sampled at an interval of 1 KiB, and tell the paths apart. */
    static final int DIRECT = 30_001, RECURSIVE = 31_003, LAMBDA = 32_009, THREAD = 33_017;

    static int direct(int size) {
        ByteBuffer buffer = ByteBuffer.allocateDirect(size);
        buffer.put(0, (byte) 1);
        synchronized (kept) {
            if (kept.size() > 50) {
                kept.clear();
            }
            kept.add(buffer);
        }
        return buffer.get(0);
    }

    static int recurse(int depth) {
        return depth == 0 ? direct(RECURSIVE) : recurse(depth - 1) + 1;
    }

    static int supplied(IntSupplier supplier) {
        return supplier.getAsInt();
    }

    static int lambda() {
        return supplied(() -> direct(LAMBDA));
    }

    static int deflate(byte[] from) {
        Deflater deflater = new Deflater();
        deflater.setInput(from);
        deflater.finish();
        int size = deflater.deflate(new byte[from.length]);
        deflater.end();
        return size;
    }

    static int inflate(byte[] packed, int size) throws Exception {
        Inflater inflater = new Inflater();
        inflater.setInput(packed);
        int done = inflater.inflate(new byte[size]);
        inflater.end();
        return done;
    }

    interface Shape {
        int allocate();
    }

    static class Square implements Shape {
        public int allocate() {
            return direct(DIRECT);
        }
    }

    static class Circle implements Shape {
        public int allocate() {
            return direct(DIRECT) + 1;
        }
    }

    static class Line implements Shape {
        public int allocate() {
            return direct(DIRECT) + 2;
        }
    }

    static int shapes(Shape[] shapes) {
        int sum = 0;
        for (Shape shape : shapes) {
            sum += shape.allocate();
        }
        return sum;
    }

    static int work(int rounds) throws Exception {
        Shape[] shapes = {new Square(), new Circle(), new Line()};
        byte[] from = new byte[2000];
        byte[] packed = new byte[4000];
        Deflater deflater = new Deflater();
        deflater.setInput(from);
        deflater.finish();
        deflater.deflate(packed);
        int sum = 0;
        for (int round = 0; round < rounds; round++) {
            sum += direct(DIRECT) + recurse(20) + lambda() + deflate(from) + inflate(packed, from.length) + shapes(shapes);
        }
        return sum;
    }

    static void run(int rounds) {
        try {
            work(rounds);
            direct(THREAD);
        } catch (Exception error) {
            throw new RuntimeException(error);
        }
    }

    public static void main(String[] words) throws Exception {
        int rounds = Integer.parseInt(words[0]);
        int threads = Integer.parseInt(words[1]);
        // Compiled before anything is recorded, unless the JVM only interprets.
        run(Integer.parseInt(words[2]));
        System.out.println("READY " + ProcessHandle.current().pid());
        System.in.read();
        List<Thread> all = new ArrayList<>();
        for (int number = 0; number < threads; number++) {
            all.add(new Thread(() -> run(rounds)));
        }
        for (Thread thread : all) {
            thread.start();
        }
        run(rounds);
        for (Thread thread : all) {
            thread.join();
        }
        System.out.println("DONE");
        while (System.in.read() >= 0) {}
    }
}
