"""The application's models, and its engine."""

from __future__ import annotations

import os

from sqlalchemy import ForeignKey, create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, relationship

URL = os.environ["EXACTLY_ONCE_CONNINFO"].replace("postgresql://", "postgresql+psycopg://")

# Behind a pooler nothing may be prepared; a pool notices by itself when a connection was lost.
engine = create_engine(URL, connect_args={"prepare_threshold": None, "connect_timeout": 10}, pool_pre_ping=True)


class Base(DeclarativeBase):
    pass


class Customer(Base):
    __tablename__ = "customer"

    id: Mapped[int] = mapped_column(primary_key=True)
    spent: Mapped[int] = mapped_column(default=0)
    orders: Mapped[list[Order]] = relationship(back_populates="customer")


class Order(Base):
    __tablename__ = "customer_order"

    id: Mapped[int] = mapped_column(primary_key=True)
    customer_id: Mapped[int] = mapped_column(ForeignKey("customer.id"))
    amount: Mapped[int]
    customer: Mapped[Customer] = relationship(back_populates="orders")
