//! Texts of figures and names.

use heapbpf_profile::report::text::{clip_middle, width};

use crate::world::ARROW;

/// The names of a stack's calls, the innermost first, in at most `columns`. Calls in the middle give way first, then
/// the outermost one. The first name is cut only if it is too long by itself, and then in its middle.
pub(super) fn chain(names: &[&str], columns: usize) -> String {
    let all = names.join(ARROW);
    let Some((last, [first, between @ ..])) = names.split_last().filter(|_| width(&all) > columns) else {
        return clip_middle(&all, columns);
    };
    for end in [&[*last][..], &[]] {
        for kept in (0..=between.len()).rev() {
            let shown: Vec<&str> = [&[*first][..], &between[..kept], &["…"][..], end].concat();
            let text = shown.join(ARROW);
            if width(&text) <= columns {
                return text;
            }
        }
    }
    clip_middle(first, columns)
}

/// Joins facts into as few lines as possible.
pub(super) fn joined(facts: &[String], columns: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for fact in facts {
        match lines.last_mut() {
            Some(line) if width(line) + 3 + width(fact) <= columns => line.push_str(&format!(" · {fact}")),
            _ => lines.push(fact.clone()),
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_in_the_middle_of_a_stack_give_way_first() {
        let names = ["grow", "parse_value", "handle", "main"];
        for (columns, text) in [
            (40, "grow ← parse_value ← handle ← main"),
            (33, "grow ← parse_value ← … ← main"),
            (20, "grow ← … ← main"),
            (12, "grow ← …"),
            (6, "grow"),
            (3, "gr…"),
        ] {
            assert_eq!(chain(&names, columns), text);
        }
        assert_eq!(chain(&["shop::Catalogue::audit", "main"], 14), "shop::C…:audit");
        assert_eq!(chain(&[], 9), "");
    }
}
