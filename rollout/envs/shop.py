"""A small shop as a database, made from a seed, and questions about any such shop with the SQL that answers them."""

import random
import sqlite3
from typing import NamedTuple

TABLES = ("customers", "products", "orders")
SCHEMA = """CREATE TABLE customers (id INTEGER PRIMARY KEY, name TEXT, city TEXT, joined_year INTEGER);
CREATE TABLE products (id INTEGER PRIMARY KEY, name TEXT, category TEXT, price INTEGER);
CREATE TABLE orders (id INTEGER PRIMARY KEY, customer_id INTEGER, product_id INTEGER, quantity INT, year INT);"""

CITIES = ("Bern", "Cork", "Faro", "Graz", "Lyon", "Oslo", "Pisa", "Riga")
CATEGORIES = ("books", "games", "garden", "music", "tools")
YEARS = (2021, 2022, 2023, 2024)
FIRST = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gina", "Hugo", "Ida", "Jan", "Kira", "Leo", "Mia", "Noah", "Olga")
LAST = ("Adler", "Brandt", "Costa", "Dubois", "Egli", "Ferrari", "Garcia", "Horn")
KINDS = ("small", "large", "old", "new", "cheap", "fine", "blue", "red")
JOINED = "orders o JOIN customers c ON c.id = o.customer_id JOIN products p ON p.id = o.product_id"


class Question(NamedTuple):
    text: str
    sql: str
    ordered: bool


# (text, SQL, whether the order of the rows is asked for)
TEMPLATES = (
    ("How many customers live in {city}?", "SELECT count(*) FROM customers WHERE city = '{city}'", False),
    (
        "What are the names of the products of category {category} that cost more than {price}?",
        "SELECT name FROM products WHERE category = '{category}' AND price > {price}",
        False,
    ),
    (
        "How many items were ordered in all by customers from {city} in {year}?",
        f"SELECT sum(o.quantity) FROM {JOINED} WHERE c.city = '{{city}}' AND o.year = {{year}}",
        False,
    ),
    (
        "Which {n} customers spent the most (quantity times price) in {year}? Give name and amount, the largest amount "
        "first, equal ones by name.",
        f"SELECT c.name, sum(o.quantity * p.price) AS spent FROM {JOINED} WHERE o.year = {{year}} GROUP BY c.id "
        "ORDER BY spent DESC, c.name LIMIT {n}",
        True,
    ),
    (
        "How many orders were there in {year} of each category? Give category and number, without those of no order.",
        f"SELECT p.category, count(*) FROM {JOINED} WHERE o.year = {{year}} GROUP BY p.category",
        False,
    ),
    (
        "What is the average price of the products of category {category}?",
        "SELECT avg(price) FROM products WHERE category = '{category}'",
        False,
    ),
    (
        "What are the names of the customers from {city} who never ordered anything of category {category}?",
        "SELECT name FROM customers WHERE city = '{city}' AND id NOT IN "
        f"(SELECT o.customer_id FROM {JOINED} WHERE p.category = '{{category}}')",
        False,
    ),
    (
        "Which products were ordered in a total quantity of more than {quantity}? Give name and quantity, by name.",
        f"SELECT p.name, sum(o.quantity) FROM {JOINED} GROUP BY p.id HAVING sum(o.quantity) > {{quantity}} "
        "ORDER BY p.name",
        True,
    ),
    (
        "How many different customers from {city} ordered something of category {category}?",
        f"SELECT count(DISTINCT c.id) FROM {JOINED} WHERE c.city = '{{city}}' AND p.category = '{{category}}'",
        False,
    ),
    (
        "How many orders has each customer from {city} made? Give name and number, also where it is 0.",
        "SELECT c.name, count(o.id) FROM customers c LEFT JOIN orders o ON o.customer_id = c.id "
        "WHERE c.city = '{city}' GROUP BY c.id",
        False,
    ),
    (
        "How many customers who joined after {year} live in each city? Give city and number, the largest number first, "
        "equal ones by city, without cities that have none.",
        "SELECT city, count(*) FROM customers WHERE joined_year > {year} GROUP BY city ORDER BY count(*) DESC, city",
        True,
    ),
    (
        "Which are the {n} dearest products of category {category}? Give their names, the dearest first, equal ones by "
        "name.",
        "SELECT name FROM products WHERE category = '{category}' ORDER BY price DESC, name LIMIT {n}",
        True,
    ),
)


def ask(rng: random.Random) -> Question:
    text, sql, ordered = rng.choice(TEMPLATES)
    values = {
        "city": rng.choice(CITIES),
        "category": rng.choice(CATEGORIES),
        "year": rng.choice(YEARS[:-1]),
        "n": rng.randint(2, 4),
        "price": 5 * rng.randint(2, 12),
        "quantity": 5 * rng.randint(2, 6),
    }
    return Question(text.format(**values), sql.format(**values), ordered)


def fill(connection: sqlite3.Connection, seed: str) -> None:
    """Makes the tables; names are unique among customers and among products."""
    rng = random.Random(seed)
    connection.executescript(SCHEMA)
    people = rng.sample([f"{first} {last}" for first in FIRST for last in LAST], rng.randint(25, 45))
    things = rng.sample([f"{kind} {category}" for kind in KINDS for category in CATEGORIES], rng.randint(18, 28))
    customers = [(i, name, rng.choice(CITIES), rng.choice(YEARS)) for i, name in enumerate(people, 1)]
    products = [(i, name, name.split()[1], rng.randint(5, 80)) for i, name in enumerate(things, 1)]
    orders = [
        (i, rng.randint(1, len(people)), rng.randint(1, len(things)), rng.randint(1, 5), rng.choice(YEARS))
        for i in range(1, rng.randint(90, 160))
    ]
    connection.executemany("INSERT INTO customers VALUES (?, ?, ?, ?)", customers)
    connection.executemany("INSERT INTO products VALUES (?, ?, ?, ?)", products)
    connection.executemany("INSERT INTO orders VALUES (?, ?, ?, ?, ?)", orders)
