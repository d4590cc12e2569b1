"""What is found in Postgres's words, whatever its language; the servers of the other tests know but few languages."""

from __future__ import annotations

import pytest

from exactly_once.writer.errors import has_name
from exactly_once.writer.plan import Plan
from exactly_once.writer.statements import place_in_copy
from exactly_once.writer.table import Column, Table

COLUMNS = ["id", "column", "Zeile 7", "line", 'a, "b": c', "列"]
PLAN = Plan(
    Table(
        schema="s",
        name="pay ment, line 3",
        columns=[Column(name=name, type_name="text", base_name="text", type_oid=25) for name in COLUMNS],
    ),
    COLUMNS,
)
# With a value, with a null, without either, and for a line alone: {r}, {n} and {c} stand for what Postgres fills in.
LANGUAGES = {
    "en": ['COPY {r}, line {n}, column {c}: "x, line 9"', "COPY {r}, line {n}, column {c}: null input",
           "COPY {r}, line {n}, column {c}", 'COPY {r}, line {n}: "1, id 2"'],
    "de": ["COPY {r}, Zeile {n}, Spalte {c}: »x«", "COPY {r}, Zeile {n}, Spalte {c}: NULL Eingabe",
           "COPY {r}, Zeile {n}, Spalte {c}", "COPY {r}, Zeile {n}: »1«"],
    "fr": ["COPY {r}, ligne {n}, colonne {c} : « x »", "COPY {r}, ligne {n}, colonne {c} : NULL en entrée",
           "COPY {r}, ligne {n}, colonne {c}", "COPY {r}, ligne {n} : « 1 »"],
    "ja": ['{r}のCOPY、行 {n}、列 {c}: "x"', "{r}のCOPY、行 {n}、列 {c}: null が入力されました",
           "{r}のCOPY、行 {n}、列 {c}", '{r}のCOPY、行 {n}: "1"'],
    "ko": ['{r} 복사, {n}번째 줄, {c} 열: "x"', "COPY {r}, {n}행, {c} 열: null 입력",
           "{r} 복사, {n}번째 줄, {c} 열", '{r} 복사, {n}번째 줄: "1"'],
    "zh": ['COPY {r}, 行 {n}, 列 {c}: "x"', "COPY {r}, 行 {n}, 列 {c}: 空的输入",
           "COPY {r}, 行 {n}, 列 {c}", 'COPY {r}, 行 {n}: "1"'],
    "ka": ['COPY {r}, ხაზი {n}, სვეტი {c}: "x"', "COPY {r}, ხაზი {n}, სვეტი {c}: ნულოვანი შეყვანა",
           "COPY {r}, ხაზი {n}, სვეტი {c}", 'COPY {r}, ხაზი {n}: "1"'],
}  # fmt: skip


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_row_and_the_column_are_found_in_any_language(language: str) -> None:
    *with_column, of_line = LANGUAGES[language]
    for relation in (PLAN.table.name, "exactly_once_stage"):
        for number, column in enumerate(COLUMNS):
            name = column if relation == PLAN.table.name else f"c{number}"
            for text in with_column:
                context = "PL/pgSQL function f() line 5\n" + text.format(r=relation, n=12, c=name)
                assert place_in_copy(PLAN, context) == (11, column), context
        assert place_in_copy(PLAN, of_line.format(r=relation, n=12)) == (11, None)


def test_what_another_copy_says_is_not_taken_for_ours() -> None:
    for context in ("", "COPY other, line 3, column id: x", "SQL statement COPY t, line 3"):
        assert place_in_copy(PLAN, context) == (None, None)


@pytest.mark.parametrize(
    "text",
    [
        "permission denied for table {}",
        "テーブル {} へのアクセスが拒否されました",
        "{} 테이블에 대한 접근 권한 없음",
        "对表 {} 权限不够",
        'წვდომა აკრძალულია ცხრილზე: "{}"',
    ],
)
def test_a_name_is_found_in_any_language_but_not_in_another_name(text: str) -> None:
    for name in ("t", "Odd name", "größe"):
        assert has_name(text.format(name), name)
        for other in (f"{name}_id_seq", f"a_{name}", f"{name}2"):
            assert not has_name(text.format(other), name)
