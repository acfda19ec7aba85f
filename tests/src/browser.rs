//! A headless browser, driven through its debugging protocol over two pipes: no port, no driver.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use base64::prelude::{BASE64_STANDARD, Engine as _};
use serde_json::{Value, json};

use crate::environment::tool_or_install;
use crate::others::Beside;

/// Timeout for anything on a page.
const PATIENCE: Duration = Duration::from_secs(60);

/// A browser with one page.
pub struct Browser {
    /// The process that `sh` became, and with it the processes that it started.
    _child: Beside,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    session: String,
    last_id: u64,
    pressed: bool,
    /// What the page's code threw or logged as an error.
    pub errors: Vec<String>,
    _home: tempfile::TempDir,
}

impl Browser {
    /// Starts Chromium. Returns `None` if it is not installed and cannot be.
    ///
    /// # Panics
    /// If it does not answer.
    pub fn start(width: u32, height: u32) -> Option<Self> {
        let chromium = tool_or_install("chromium", "chromium")?;
        let home = tempfile::tempdir().expect("a temporary directory");
        // The protocol uses descriptors 3 (to the browser) and 4 (from it).
        let mut child = Command::new("sh")
            .args(["-c", "exec \"$@\" 3<&0 4>&1 </dev/null >/dev/null 2>&1", "sh"])
            .arg(chromium)
            .args(["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe"])
            .args(["--disable-background-networking", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"])
            .args([format!("--user-data-dir={}", home.path().display()), format!("--window-size={width},{height}")])
            .arg("about:blank")
            .env("HOME", home.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("sh runs");
        let (input, output) = (child.stdin.take().expect("piped"), child.stdout.take().expect("piped"));
        let mut browser = Self {
            _child: Beside(child),
            input,
            output: BufReader::new(output),
            session: String::new(),
            last_id: 0,
            pressed: false,
            errors: Vec::new(),
            _home: home,
        };
        let target = browser.call("Target.createTarget", json!({"url": "about:blank"}));
        let attached = browser.call("Target.attachToTarget", json!({"targetId": target["targetId"], "flatten": true}));
        browser.session = attached["sessionId"].as_str().expect("a session").to_owned();
        for domain in ["Page.enable", "Runtime.enable", "Log.enable"] {
            browser.call(domain, json!({}));
        }
        browser.resize(width, height);
        Some(browser)
    }

    /// Sends a command and waits for its answer.
    ///
    /// # Panics
    /// If the browser refuses it, or is gone.
    pub fn call(&mut self, method: &str, parameters: Value) -> Value {
        self.last_id += 1;
        let mut message = json!({"id": self.last_id, "method": method, "params": parameters});
        if !self.session.is_empty() {
            message["sessionId"] = self.session.clone().into();
        }
        let mut bytes = serde_json::to_vec(&message).expect("plain data");
        bytes.push(0);
        self.input.write_all(&bytes).expect("the browser listens");
        self.input.flush().expect("the browser listens");
        loop {
            let message = self.next();
            if message["id"] == self.last_id {
                assert!(message["error"].is_null(), "{method}: {}", message["error"]);
                return message["result"].clone();
            }
        }
    }

    fn next(&mut self) -> Value {
        let mut bytes = Vec::new();
        self.output.read_until(0, &mut bytes).expect("the browser speaks");
        assert_eq!(bytes.pop(), Some(0), "the browser ended");
        let message: Value = serde_json::from_slice(&bytes).expect("JSON");
        match message["method"].as_str() {
            Some("Runtime.exceptionThrown") => self.errors.push(message["params"]["exceptionDetails"].to_string()),
            Some("Log.entryAdded") if message["params"]["entry"]["level"] == "error" => {
                self.errors.push(message["params"]["entry"].to_string());
            }
            _ => {}
        }
        message
    }

    /// Opens an address, and waits until `expression` is true there.
    pub fn open(&mut self, url: &str, expression: &str) {
        self.call("Page.navigate", json!({"url": url}));
        self.until(expression);
    }

    /// Opens a file, and waits until `expression` is true there.
    pub fn open_file(&mut self, file: &Path, expression: &str) {
        self.open(&format!("file://{}", file.display()), expression);
    }

    /// The value of an expression on the page.
    ///
    /// # Panics
    /// If it throws.
    pub fn value(&mut self, expression: &str) -> Value {
        let options = json!({"expression": expression, "returnByValue": true, "awaitPromise": true});
        let result = self.call("Runtime.evaluate", options);
        assert!(result["exceptionDetails"].is_null(), "{expression}: {}", result["exceptionDetails"]);
        result["result"]["value"].clone()
    }

    /// The value of an expression on the page, as text.
    pub fn text(&mut self, expression: &str) -> String {
        let value = self.value(expression);
        value.as_str().map_or_else(|| value.to_string(), str::to_owned)
    }

    /// Waits until an expression is true on the page.
    ///
    /// # Panics
    /// If it does not become true.
    pub fn until(&mut self, expression: &str) {
        let begun = Instant::now();
        let guarded = format!("(() => {{ try {{ return Boolean({expression}) }} catch {{ return false }} }})()");
        while self.value(&guarded) != true {
            let shown = begun.elapsed() < PATIENCE;
            assert!(
                shown,
                "{expression} does not become true on: {}",
                self.text("document.body.innerText.slice(0, 3000)")
            );
            std::thread::sleep(Duration::from_millis(30));
        }
    }

    /// Clicks the middle of the element that matches a selector.
    pub fn click(&mut self, selector: &str) {
        let place = self.value(&format!(
            "(() => {{ const it = document.querySelector({}); it.scrollIntoView({{block: 'center'}}); const box = it.getBoundingClientRect(); return [box.x + box.width / 2, box.y + box.height / 2] }})()",
            json!(selector)
        ));
        self.click_at(place[0].as_f64().expect("a place"), place[1].as_f64().expect("a place"));
    }

    /// Clicks a position in the window.
    pub fn click_at(&mut self, x: f64, y: f64) {
        self.mouse("mouseMoved", x, y);
        self.mouse("mousePressed", x, y);
        self.mouse("mouseReleased", x, y);
    }

    /// Drags from one position in the window to another.
    pub fn drag(&mut self, from: (f64, f64), to: (f64, f64)) {
        self.mouse("mouseMoved", from.0, from.1);
        self.mouse("mousePressed", from.0, from.1);
        for step in 1..=4 {
            let part = f64::from(step) / 4.0;
            self.mouse("mouseMoved", from.0 + (to.0 - from.0) * part, from.1 + (to.1 - from.1) * part);
        }
        self.mouse("mouseReleased", to.0, to.1);
    }

    fn mouse(&mut self, kind: &str, x: f64, y: f64) {
        match kind {
            "mousePressed" => self.pressed = true,
            "mouseReleased" => self.pressed = false,
            _ => {}
        }
        let button = if kind == "mouseMoved" && !self.pressed { "none" } else { "left" };
        let held = u8::from(self.pressed);
        let event = json!({"type": kind, "x": x, "y": y, "button": button, "buttons": held, "clickCount": 1});
        self.call("Input.dispatchMouseEvent", event);
    }

    /// Presses a key by its name (`Enter`, `ArrowDown`, `a`).
    pub fn key(&mut self, key: &str) {
        for kind in ["keyDown", "keyUp"] {
            let mut event = json!({"type": kind, "key": key});
            if key.len() == 1 && kind == "keyDown" {
                event["text"] = key.into();
            }
            if key == "Enter" && kind == "keyDown" {
                event["text"] = "\r".into();
            }
            self.call("Input.dispatchKeyEvent", event);
        }
    }

    /// Types text where the focus is.
    pub fn type_text(&mut self, text: &str) {
        self.call("Input.insertText", json!({"text": text}));
    }

    /// Sets the size of the window.
    pub fn resize(&mut self, width: u32, height: u32) {
        let size = json!({"width": width, "height": height, "deviceScaleFactor": 1, "mobile": false});
        self.call("Emulation.setDeviceMetricsOverride", size);
    }

    /// Shows pages as on a system with light or dark colours.
    pub fn prefer(&mut self, scheme: &str) {
        let features = json!({"features": [{"name": "prefers-color-scheme", "value": scheme}]});
        self.call("Emulation.setEmulatedMedia", features);
    }

    /// A screenshot of the window, as PNG.
    pub fn picture(&mut self) -> Vec<u8> {
        let picture = self.call("Page.captureScreenshot", json!({"format": "png", "optimizeForSpeed": false}));
        BASE64_STANDARD.decode(picture["data"].as_str().expect("a picture")).expect("Base64")
    }

    /// Whether nothing is wider than the window: the page does not scroll sideways, and nothing is cut off.
    pub fn fits(&mut self) -> bool {
        self.cut_off() == json!([]) && self.value("document.scrollingElement.scrollWidth <= innerWidth") == true
    }

    /// Some of the elements that reach beyond the right edge of the window, or that scroll sideways or clip. A text may
    /// end with dots, and preformatted text may scroll.
    pub fn cut_off(&mut self) -> Value {
        self.value(CUT_OFF)
    }
}

const CUT_OFF: &str = "[...document.body.querySelectorAll('*')].filter(it => {
    const right = it.getBoundingClientRect().right, style = getComputedStyle(it);
    if (it.getBoundingClientRect().width === 0 || it.closest('.sr, pre')) return false;
    const clips = it.clientWidth > 0 && style.overflowX !== 'visible' && style.textOverflow !== 'ellipsis';
    return right > innerWidth + 1 || clips && it.scrollWidth > it.clientWidth + 1;
}).slice(0, 5).map(it => `${it.tagName}#${it.id}.${it.className}: ${Math.round(it.getBoundingClientRect().right)}, ${it.scrollWidth} in ${it.clientWidth}`)";
