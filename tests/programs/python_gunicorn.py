"""An application for gunicorn. GET /N allocates an array of N bytes, and answers with the process and the Python stack of it."""
import json
import os
import sys
import time


def frames_of(frame):
    """Function, file and line of each frame, innermost first."""
    frames = []
    while frame is not None:
        code = frame.f_code
        frames.append([getattr(code, "co_qualname", code.co_name), code.co_filename, frame.f_lineno])
        frame = frame.f_back
    return frames


class Page:
    def __init__(self, path):
        self.bytes = int(path.strip("/"))

    def render(self):
        # The interpreter asks for one byte more.
        frames = frames_of(sys._getframe()), bytearray(self.bytes - 1)
        return frames[0]


def application(environ, start_response):
    frames = Page(environ["PATH_INFO"]).render()
    # Meanwhile another request goes to another worker.
    time.sleep(0.3)
    body = json.dumps({"pid": os.getpid(), "frames": frames}).encode()
    start_response("200 OK", [("Content-Type", "application/json"), ("Content-Length", str(len(body)))])
    return [body]
