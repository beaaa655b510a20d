"""SqliteQa: only reading, within limits; and only SQL that answers the question on any data is paid for."""

import json
from functools import partial
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.envs import shop
from rollout.envs.read_only import ReadOnlyDatabase, SqlError
from rollout.envs.sqlite_qa import SqliteQa
from tests.unit.rollout.envs.playing import act, begin, play, total

DATA = SqliteQa.make_task("train", 0, 0)
COUNT = {
    **DATA,
    "text": "How many customers are there?",
    "sql": "SELECT count(*) FROM customers",
    "ordered": False,
}


@pytest.fixture
def database():
    made = ReadOnlyDatabase(lambda connection: shop.fill(connection, "a"), shop.TABLES)
    yield made
    made.close()


@pytest.mark.parametrize(
    "sql",
    [
        "ATTACH DATABASE '/tmp/x.db' AS x",
        "DETACH DATABASE main",
        "PRAGMA table_info(customers)",
        "SELECT * FROM pragma_table_info('customers')",
        "SELECT * FROM sqlite_master",
        "INSERT INTO customers VALUES (999, 'x', 'y', 1)",
        "UPDATE customers SET name = 'x'",
        "DELETE FROM customers",
        "DROP TABLE customers",
        "CREATE TABLE t (a)",
        "CREATE TEMP TABLE t AS SELECT 1",
        "CREATE TABLE t AS SELECT * FROM customers",
        "VACUUM INTO '/tmp/x.db'",
        "BEGIN",
        "REINDEX",
        "ANALYZE",
        "SELECT load_extension('x')",
        "SELECT readfile('/etc/passwd')",
        "SELECT randomblob(100)",
        "SELECT zeroblob(1000000000)",
        "SELECT printf('%1000000d', 1)",
        "SELECT hex(name) FROM customers",
        "SELECT 1; DROP TABLE customers",
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n",
        "SELECT * FROM nowhere",
        "SELECT ?",
        "",
        "-- nothing",
        "\0",
        "SELECT '\ud800'",
        "nonsense",
        "SELECT " + "(" * 200 + "1" + ")" * 200,
        "SELECT " + " || ".join(["'" + "x" * 400 + "'"] * 6),
        "SELECT '" + "x" * 6000 + "'",
    ],
)
def test_everything_but_a_bounded_select_is_stopped(database, sql) -> None:
    before = database.query("SELECT count(*), max(name) FROM customers", 1)
    with pytest.raises(SqlError):
        database.query(sql, 5)
    assert database.query("SELECT count(*), max(name) FROM customers", 1) == before


def test_a_query_that_takes_too_long_is_stopped_and_the_next_is_not(database) -> None:
    with pytest.raises(SqlError, match="takes too long"):
        database.query("SELECT count(*) FROM orders a, orders b, orders c, orders d", 5)
    assert database.query("SELECT 1", 5).rows == [(1,)]


def test_ordinary_selects_are_allowed(database) -> None:
    for sql in (
        "WITH spent AS (SELECT customer_id, sum(quantity) AS n FROM orders GROUP BY 1) SELECT max(n) FROM spent",
        "SELECT upper(name) || '!' FROM customers WHERE name LIKE 'a%' UNION SELECT 'x' ORDER BY 1",
        "SELECT name, row_number() OVER (ORDER BY price) FROM products",
        "SELECT count(*) FROM orders a, customers b, products c WHERE a.customer_id = b.id AND a.product_id = c.id",
        "SELECT CASE WHEN EXISTS (SELECT 1 FROM orders) THEN round(1.5) ELSE NULL END",
        "VALUES (1), (2)",
        "SELECT 1;",
    ):
        assert database.query(sql, 100).rows


def test_rows_and_characters_of_a_result_are_capped() -> None:
    env = SqliteQa(max_rows=3, max_characters=200)
    begin(env, DATA)
    few = act(env, env.call_text("query", sql="SELECT id FROM customers ORDER BY id")).messages[0]["content"]
    assert few == "id\n1\n2\n3\n... (there are more than 3 rows)"
    long = act(env, env.call_text("query", sql=f"SELECT '{'x' * 1000}'")).messages[0]["content"]
    assert len(long) < 260 and "cut off" in long
    none = act(env, env.call_text("query", sql="SELECT 1.5 AS a WHERE 0")).messages[0]["content"]
    assert none == "a\n(no rows)"
    wrong = act(env, env.call_text("query", sql="DROP TABLE customers"))
    assert "not authorized" in wrong.messages[0]["content"] and wrong.info["tool_errors"] == 1


def visible_count() -> int:
    env = SqliteQa()
    begin(env, COUNT)
    return int(act(env, env.call_text("query", sql=COUNT["sql"])).messages[0]["content"].split("\n")[1])


def test_an_answer_that_fits_only_the_visible_database_is_not_paid() -> None:
    count = visible_count()
    for sql, right in (
        (f"SELECT {count}", 0.0),
        (f"SELECT count(*) FROM customers WHERE id <= {count}", 0.0),
        ("SELECT max(id) FROM customers", 1.0),
        ("SELECT count(*) FROM customers, (SELECT 1)", 1.0),
        ("SELECT count(*), 1 FROM customers", 0.0),
        ("SELECT count(*) FROM nowhere", 0.0),
    ):
        assert total(play(SqliteQa(), COUNT, [sql])) == right
        env = SqliteQa()
        begin(env, COUNT)
        result = act(env, env.call_text("submit", sql=sql))
        assert (result.reward, result.terminated, result.info["correct"]) == (right, True, right)


def test_order_counts_only_where_it_is_asked_for() -> None:
    data = {**COUNT, "sql": "SELECT id FROM customers ORDER BY id"}
    backwards = data["sql"] + " DESC"
    assert total(play(SqliteQa(), data, [backwards])) == 1.0
    assert total(play(SqliteQa(), {**data, "ordered": True}, [backwards])) == 0.0
    assert total(play(SqliteQa(), data, ["SELECT id FROM customers UNION ALL SELECT 1"])) == 0.0


def test_the_last_fenced_block_is_the_answer() -> None:
    text = f"First ```sql\nSELECT 1\n``` but then:\n```\n{COUNT['sql']};\n```\nDone."
    assert total(play(SqliteQa(), COUNT, [text])) == 1.0


@given(st.text(max_size=30) | st.sampled_from(["select ", "from orders", "';--"]))
def test_any_text_as_sql_gives_rows_or_sql_error(text) -> None:
    made = ReadOnlyDatabase(lambda connection: None, ())
    try:
        made.query(text, 5)
    except SqlError:
        pass
    finally:
        made.close()


def test_every_question_can_be_asked(database) -> None:
    for text, sql, _ in shop.TEMPLATES:
        for city, category, year in product(shop.CITIES[:2], shop.CATEGORIES[:2], shop.YEARS[:2]):
            values = {"city": city, "category": category, "year": year, "n": 2, "price": 20, "quantity": 10}
            assert "{" not in text.format(**values)
            assert database.query(sql.format(**values), 1000).complete


def test_the_two_databases_differ_in_their_answers() -> None:
    for index in range(10):
        data = SqliteQa.make_task("train", 1, index)
        answers = []
        for key in ("visible", "hidden"):
            made = ReadOnlyDatabase(partial(shop.fill, seed=data[key]), shop.TABLES)
            answers.append(json.dumps(made.query(data["sql"], 1000).rows))
            made.close()
        assert answers[0] != answers[1]
