"""The tables that tasks are made of, in two pools that share no table name.

A line is ``table: one row, several rows: columns``. A column is its name and ``@pool`` (a label), ``a|b|c``
(a category), ``low..high`` or ``low..high..step`` (a number), ``#low..high`` (an identifier) or ``date``.
"""

from __future__ import annotations

from agent_peft.environments.db_bench.schemas import read_schemas

_LABELS = {
    "people": """
Ann Lee|Ben Ortiz|Carla Diaz|David Kim|Ella Novak|Frank Moss|Grace Hall|Hugo Weber|Ines Costa|Jack Stone|Kira Patel|
Liam Byrne|Mona Ali|Nina Rossi|Omar Haddad|Paula Reyes|Quinn Baker|Rosa Lima|Sean O'Brien|Tara Singh|Uma Rao|Victor Hugo|
Wendy Clark|Xia Chen|Yusuf Demir|Zoe Adams|Maya Cohen|Leo Fischer|Nora Berg|Ivan Petrov""",  # noqa: E501
    "titles": """
Silver River|Night Train|The Last Orchard|Paper Moon|Winter's End|Red Harbor|Quiet Hills|Golden Hour|Broken Compass|
Summer Rain|Glass Garden|Deep Water|Open Road|First Light|Stone Bridge|Hidden Valley|Blue Lantern|Iron Gate|Long Shadow|
Second Sun""",  # noqa: E501
    "places": """
Fairview|Oakdale|Port Ellen|Lakeside|Millbrook|Ashford|Kingston|Westfield|Green Bay|Harlow|Summit|Cedar Falls|St. Mary's|
Dover|Riverton|Elmwood|Marlow|Stonehaven|Bridgeport|Eastgate""",  # noqa: E501
    "shops": """
Blue Door|Corner Market|Baker's Choice|Sunrise Foods|Maple & Co|North Star|Urban Goods|Red Barn|Fresh Fields|Harbor House|
Top Shelf|Green Leaf|Old Mill|Silver Spoon|City Works|Bright Side|Oak Table|Little Owl""",  # noqa: E501
    "tools": """
Hammer|Drill|Wrench|Chisel|Hand Saw|Clamp|Sander|Ladder|Pliers|Level|Screwdriver|Tape Measure|Heat Gun|Workbench|Planer|Vise""",  # noqa: E501
    "goods": """
Desk Lamp|Notebook|Backpack|Water Bottle|Phone Case|Headphones|Office Chair|Coffee Mug|Wall Clock|Umbrella|Keyboard|
Mouse Pad|Wool Scarf|Travel Pillow|Picture Frame|Candle Set|Sun Hat|Yoga Mat""",  # noqa: E501
    "foods": """
Tomato Soup|Apple Pie|Fish Tacos|Veggie Burger|Onion Rings|Caesar Salad|Mushroom Risotto|Chicken Curry|Pancakes|Garlic Bread|
Lentil Stew|Fruit Salad|Cheese Plate|Spring Rolls|Beef Noodles|Rice Bowl""",  # noqa: E501
    "names": """
Bella|Max|Luna|Charlie|Daisy|Rocky|Milo|Coco|Oscar|Ruby|Simba|Nala|Bruno|Willow|Pepper|Ziggy|Shadow|Honey""",
}

_TRAIN = """
coffee_orders: order, orders: order_id #100..400, customer @people, drink Latte|Mocha|Espresso|Flat White, cups 1..24
employees: employee, employees: name @people, department Sales|Finance|Support|Legal, salary 30000..90000..500, hire_date date
library_books: book, books: title @titles, genre Fiction|History|Science|Poetry, pages 90..700, copies 1..30
pet_clinic: pet, pets: pet_name @names, species dog|cat|rabbit, age 1..18, owner @people
hotel_rooms: room, rooms: room_number #101..420, room_type single|double|suite, price 60..400..5, status free|booked|cleaning
tool_stock: tool, tools: tool @tools, brand Bosch|Makita|Stanley, quantity 1..80, unit_price 4..250
flight_bookings: booking, bookings: booking_id #100..900, passenger @people, destination Paris|Cairo|Lima, fare 80..950..5, flight_date date
students: student, students: student @people, major Physics|Biology|Art|Law, credits 6..120, grade 40..100
menu_items: dish, dishes: dish @foods, course starter|main|dessert, price 3..40, calories 80..1200..10
warehouse_items: item, items: item_id #1..300, item_name @goods, zone A|B|C, stock 0..500
gym_members: member, members: member @people, plan basic|plus|premium, visits 0..60, joined_on date
city_weather: city, cities: city @places, sky sunny|cloudy|rainy, temperature 2..40, humidity 20..98
movie_list: movie, movies: movie @titles, rating G|PG|R, minutes 75..210, release_year 1960..2024
bus_routes: route, routes: route_number #1..120, terminal @places, operator MetroLine|CityBus|GoFast, stops 5..48
bank_accounts: account, accounts: account_id #500..999, holder @people, account_type savings|checking|business, balance 100..20000..50
clinic_visits: visit, visits: visit_id #1..200, patient @people, doctor Dr. Hill|Dr. Sato|Dr. Meyer, fee 20..300..5, visit_date date
garden_plants: plant, plants: plant_id #1..150, plant_type rose|fern|tulip|cactus, height_cm 5..180, light shade|full sun
museum_exhibits: exhibit, exhibits: exhibit @titles, hall East|West|North, visitors 50..3000..10, opened_on date
car_rentals: rental, rentals: driver @people, car_type compact|van|SUV, rental_days 1..28, total_cost 40..1800..10
football_players: player, players: player @people, team Lions|Hawks|Wolves, goals 0..40, jersey 1..99
online_courses: course, courses: course_title @titles, subject Coding|Design|Music, enrolled 10..900, fee 15..400..5
support_tickets: ticket, tickets: ticket_id #1..900, customer @people, priority low|medium|high, status open|closed, hours_spent 1..40
bakery_sales: sale, sales: sale_id #1..500, product bread|bagel|croissant|muffin, quantity 1..60, sale_date date
apartments: apartment, apartments: unit #1..90, tenant @people, block North|South|Garden, rent 600..2800..25
wine_cellar: bottle, bottles: label_name @titles, grape Merlot|Syrah|Riesling, vintage 1985..2022, price 8..220
delivery_trips: trip, trips: trip_id #1..400, courier @people, vehicle bike|scooter|truck, distance_km 1..90
toy_store: toy, toys: toy_id #1..250, material wood|plastic|fabric, age_group 0-3|4-7|8-12, price 2..90, in_stock 0..120
concert_tickets: concert, concerts: concert @titles, venue Main Hall|Arena|Old Theater, seats 50..2000..10, concert_date date
"""  # noqa: E501

_HELDOUT = """
farm_animals: animal, animals: tag #1..300, animal_name @names, breed sheep|goat|cow, weight_kg 20..600
ship_cargo: container, containers: container_id #100..900, cargo grain|steel|textiles|fruit, tons 1..60, loaded_on date
volunteers: volunteer, volunteers: volunteer @people, task_area kitchen|transport|office, hours 1..80
grocery_vendors: vendor, vendors: vendor @shops, region North|South|Coast, deliveries 1..90, amount_due 50..5000..10
podcast_episodes: episode, episodes: episode_title @titles, host Amir|Julia|Sofia, duration 10..120, downloads 100..9000..50
lab_specimens: specimen, specimens: specimen_id #1..600, specimen_type blood|water|soil, volume_ml 5..250, collected_on date
art_auction: artwork, artworks: artwork @titles, artist @people, style abstract|portrait|landscape, final_bid 200..9000..50
phone_plans: plan, plans: plan_code #10..99, carrier Nova|Bluecell|Orbit, monthly_fee 8..90, data_gb 1..120
swim_meet: swimmer, swimmers: swimmer @people, stroke butterfly|freestyle|backstroke, seconds 25..180, club Marlins|Otters
food_trucks: truck, trucks: truck_name @shops, cuisine Thai|Mexican|Greek|Indian, daily_sales 100..2500..10, licensed_on date
ski_rentals: rental, rentals: rental_id #1..400, guest @people, gear skis|snowboard|sled, deposit 10..150..5
recycling_sites: site, sites: site_name @places, waste glass|paper|metal, bins 1..60, pickups 1..40
board_games: game, games: game_id #1..200, publisher Kosmos|Asmodee|Ravens, play_minutes 10..240..5, max_players 2..14
radio_shows: show, shows: show_title @titles, station KXR|Wave FM|City One, listeners 100..8000..20, first_aired date
"""  # noqa: E501

TRAIN = read_schemas(_TRAIN, _LABELS)
HELDOUT = read_schemas(_HELDOUT, _LABELS)
