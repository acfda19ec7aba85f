//! SQL that keeps a database busy.

/// An SQL script that fills a table with an index.
pub fn rows(count: u64) -> String {
    let mut text = String::from("CREATE TABLE items(id INTEGER PRIMARY KEY, name TEXT, note TEXT, price REAL);\n");
    text += "CREATE INDEX names ON items(name);\nBEGIN;\n";
    for i in 0..count {
        let (name, words) = (i.wrapping_mul(2_654_435_761) % 1_000_003, "word ".repeat((i % 40) as usize));
        text +=
            &format!("INSERT INTO items VALUES({i}, hex('item {name}'), upper('{words}of row {i}'), {i} * 1.25);\n");
    }
    text + "COMMIT;\nSELECT count(*), sum(length(note)) FROM items;\n"
}
