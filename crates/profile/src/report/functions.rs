//! The top functions, by what is allocated in them and in the functions that they call.

use std::collections::HashMap;

use super::figures::FigureTable;
use super::{Context, chain};
use crate::estimates::Pool;
use crate::intern::Interned;
use crate::report::text::{Column, Style, clip};

/// Lines of the section; empty if it was not requested or there are no functions.
pub(super) fn section(context: &Context) -> Vec<String> {
    let wanted = context.options.functions;
    if wanted == 0 {
        return Vec::new();
    }
    let functions = functions(context);
    if functions.is_empty() {
        return Vec::new();
    }
    let shown = &functions[..functions.len().min(wanted)];
    let mut table = FigureTable::new(context, &[Column::left("FUNCTION", Style::Name)]);
    for (name, pool) in shown {
        table.row(context, pool, vec![clip(name, context.width / 3)]);
    }
    let about = format!(" · top {} of {} · stacks through them, each counted once", shown.len(), functions.len());
    let title = "By function";
    let about = clip(&about, context.width.saturating_sub(title.len()));
    let (header, rows) = table.lines(context);
    let mut lines = vec![context.heading(title) + &context.paint(Style::Dim, &about), header];
    lines.extend(rows);
    lines.extend(table.notes(context));
    lines
}

/// Functions with the pools of their samples, the largest first.
fn functions(context: &Context) -> Vec<(String, Pool)> {
    let interned = Interned::new(context.profile);
    let mut numbers: HashMap<String, usize> = HashMap::new();
    let mut functions: Vec<(String, Pool)> = Vec::new();
    let function_of_frame: Vec<usize> = interned
        .frames
        .iter()
        .map(|frame| {
            let name = chain::call(context.profile, frame).name;
            *numbers.entry(name.clone()).or_insert_with(|| {
                functions.push((name, Pool::default()));
                functions.len() - 1
            })
        })
        .collect();
    let of_stack: Vec<Vec<usize>> = (0..interned.stacks.len() as u32)
        .map(|stack| {
            let skipped = chain::allocator_frames(interned.stacks[stack as usize].stack);
            let frames = &interned.frame_ids(stack)[skipped..];
            let mut through: Vec<usize> = frames.iter().map(|&frame| function_of_frame[frame as usize]).collect();
            // A recursive function counts once per stack.
            through.sort_unstable();
            through.dedup();
            through
        })
        .collect();
    for (row, &stack) in context.profile.rows.iter().zip(&interned.stack_of_row) {
        for &function in &of_stack[stack as usize] {
            functions[function].1.add(row);
        }
    }
    functions.retain(|(_, pool)| pool.sums(context.sort).next().is_some());
    functions.iter_mut().for_each(|(_, pool)| pool.allow_for(&context.intervals));
    let size = |pool: &Pool| pool.total(context.sort);
    functions.sort_by(|a, b| size(&b.1).total_cmp(&size(&a.1)).then_with(|| a.0.cmp(&b.0)));
    functions
}
