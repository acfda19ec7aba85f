//! The commands in a document with the output that it shows, and a comparison with their real output.

/// A command of a document.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// The command, for a shell.
    pub command: String,
    /// The lines that the document shows below it.
    pub output: Vec<String>,
}

/// Stands for any number of lines, or, at the end of a line, for the rest of it.
const ANYTHING: &str = "…";
/// Factor by which a size may be larger or smaller than in the document.
const FACTOR: f64 = 4.0;

/// The commands of all `console` blocks, in order: lines that begin with `$ `.
pub fn steps(document: &str) -> Vec<Step> {
    let mut steps: Vec<Step> = Vec::new();
    let mut is_console = false;
    for line in document.lines() {
        if let Some(kind) = line.strip_prefix("```") {
            is_console = kind == "console";
        } else if is_console {
            match (line.strip_prefix("$ "), steps.last_mut()) {
                (Some(command), _) => steps.push(Step { command: command.to_owned(), output: Vec::new() }),
                (None, Some(step)) => step.output.push(line.to_owned()),
                (None, None) => {}
            }
        }
    }
    steps
}

/// Compares what a command printed with the document. Spaces and figures may differ. Sizes may differ by a factor of
/// four, and zero bytes must be zero bytes.
///
/// # Errors
/// The first line of the document that was not printed, and where it should have been.
pub fn compare(documented: &[String], printed: &str) -> Result<(), String> {
    let printed: Vec<&str> = printed.lines().collect();
    let (mut at, mut may_skip) = (0, false);
    for line in documented {
        if line.trim() == ANYTHING {
            may_skip = true;
            continue;
        }
        let last = if may_skip { printed.len() } else { printed.len().min(at + 1) };
        let found = (at..last).find(|&index| is_alike(line, printed[index]));
        let Some(found) = found else {
            let near = printed.get(at).copied().unwrap_or("the end of the output");
            return Err(format!("not printed:\n{line}\nat or after line {}:\n{near}", at + 1));
        };
        (at, may_skip) = (found + 1, false);
    }
    if may_skip || at == printed.len() { Ok(()) } else { Err(format!("not in the document: {}", printed[at])) }
}

/// Whether two lines have the same words, and figures that may describe the same thing.
fn is_alike(documented: &str, printed: &str) -> bool {
    let (open, documented) = match documented.trim_end().strip_suffix(ANYTHING) {
        Some(begin) => (true, words(begin)),
        None => (false, words(documented)),
    };
    let printed = words(printed);
    let lengths = if open { printed.len() >= documented.len() } else { printed.len() == documented.len() };
    lengths && documented.iter().zip(&printed).all(|(a, b)| a.is_like(b))
}

/// A word of a line, with its figure removed.
#[derive(Clone, Debug, PartialEq)]
struct Word {
    /// The word, with `#` in place of the figure.
    text: String,
    figure: Option<f64>,
    /// Bytes per following unit, if the figure is a size.
    unit: Option<f64>,
}

impl Word {
    fn is_like(&self, other: &Self) -> bool {
        let sizes = match (self.figure.zip(self.unit), other.figure.zip(other.unit)) {
            (Some((a, a_unit)), Some((b, b_unit))) => {
                let (a, b) = (a * a_unit, b * b_unit);
                (a == 0.0 && b == 0.0) || (a < b * FACTOR && b < a * FACTOR)
            }
            (None, None) => true,
            _ => false,
        };
        sizes && self.text == other.text
    }
}

/// Splits a line at spaces. Different units of sizes and times become equal (`KiB` and `MiB`, `ns` and `µs`), and so do
/// singular and plural: `1 stack` and `3 stacks`.
fn words(line: &str) -> Vec<Word> {
    let mut words: Vec<Word> = line.split_whitespace().map(without_figure).collect();
    for index in 1..words.len() {
        let [before, word] = &mut words[index - 1..=index] else { unreachable!("two words") };
        let end = word.text.trim_start_matches(|c: char| c.is_ascii_alphabetic() || c == 'µ').to_owned();
        let name = &word.text[..word.text.len() - end.len()];
        let bytes =
            ["B", "KiB", "MiB", "GiB"].iter().position(|unit| *unit == name).map(|power| 1024_f64.powi(power as i32));
        let is_time = ["ns", "µs", "ms", "s"].contains(&name);
        if before.figure.is_some() && (bytes.is_some() || is_time) {
            before.unit = bytes;
            word.text = format!("{}{end}", if is_time { "(time)" } else { "(size)" });
        } else if before.figure.is_some() && end.is_empty() && name.len() > 2 {
            // "stack" and "stacks" are equal.
            word.text = name.trim_end_matches('s').to_owned();
        }
    }
    words
}

/// Removes the figure from a word that begins with one, after a bracket or a sign: `[9.33,`, `~35,619`, `(5001)`,
/// `−1.2e-8`.
fn without_figure(word: &str) -> Word {
    let whole = || Word { text: word.to_owned(), figure: None, unit: None };
    let begin = word.trim_start_matches(['[', '(']);
    let digits = begin.trim_start_matches(['~', '+', '-', '−', '<', '>']);
    if !digits.starts_with(|c: char| c.is_ascii_digit()) {
        return whole();
    }
    let end = digits.trim_start_matches(|c: char| c.is_ascii_digit() || ".,e-".contains(c));
    let figure = digits[..digits.len() - end.len()].trim_end_matches([',', '.']);
    let end = &digits[figure.len()..];
    match figure.replace(',', "").parse() {
        Ok(value) => {
            Word { text: format!("{}#{end}", &word[..word.len() - begin.len()]), figure: Some(value), unit: None }
        }
        Err(_) => whole(),
    }
}
